# SPDX-License-Identifier: Apache-2.0
"""The simulated cluster: every request is answered once, whatever happens, and routing by documents pays."""

import json
import shutil
import time
import tracemalloc
from dataclasses import replace

import pytest

from benchmarks import cluster_simulation
from benchmarks.cluster import router
from benchmarks.cluster.clock import Clock
from benchmarks.cluster.registry import BEAT_S, FLUSH_S, LEASE_S, SimulatedRegistry
from benchmarks.cluster.replica import EngineModel, Request, SimulatedReplica
from benchmarks.cluster.router import POLICIES, by_hash
from benchmarks.cluster.simulation import Setup, Simulation, one_replica
from benchmarks.cluster.workload import OF_ONE_TOPIC, TOPIC_DOCUMENTS, Corpus, Workload, key_of, make_arrivals
from benchmarks.eviction import Chunk
from replicas.registry import Holding, Replica, Tier
from replicas.routing import Candidate

MODEL = EngineModel(pool_tokens=65_536)


def setup(replicas, per_replica=150, documents=500, hot=0.0, **fields):
    """Pools hold a quarter of the documents, as they do in the benchmark."""
    workload = Workload(documents * replicas, 2 * per_replica * replicas, per_replica * replicas, hot)
    return Setup(replicas, workload, MODEL, **fields)


def run(setup, policy="rank"):
    simulation = Simulation(setup, policy, one_replica(setup))
    return simulation, simulation.run()


@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_is_answered_once(policy):
    simulation, outcome = run(setup(4), policy)
    assert len(simulation.requests) == 1200
    assert all(request.at < request.first_token_at <= request.finished_at for request in simulation.requests)
    assert all(request.sendings == 1 for request in simulation.requests)
    assert all(replica.load == 0 for replica in simulation.living.values())
    assert (outcome.requests, outcome.sent_again) == (600, 0)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_seed_gives_the_same_outcome(policy):
    some = setup(3, 50)
    outcomes = [replace(run(each, policy)[1], cpu_s=0) for each in (some, some)]
    assert outcomes[0] == outcomes[1]
    other = replace(some, workload=replace(some.workload, seed=1))
    assert run(other, policy)[1].hit_rate != outcomes[0].hit_rate


def test_rank_finds_more_than_policies_that_do_not_know_where_documents_are():
    found = {policy: run(setup(8), policy)[1] for policy in POLICIES}
    ours, others = found.pop("rank"), found
    assert all(ours.hit_rate >= 1.5 * others[policy].hit_rate for policy in ("round robin", "least load", "hashing"))
    assert ours.hit_rate > others["rank alone"].hit_rate
    assert ours.ttft_mean_s < min(other.ttft_mean_s for other in others.values())
    assert all(other.hit_rate_of_one == ours.hit_rate_of_one > ours.hit_rate for other in others.values())


def test_two_replicas_find_nearly_what_one_with_both_pools_would():
    _, outcome = run(setup(2, 1000))
    assert outcome.hit_rate > 0.95 * outcome.hit_rate_of_one


def test_a_hot_topic_does_not_overload_the_replica_that_had_it():
    _, outcome = run(setup(8, hot=0.3))
    assert outcome.balance < 2
    assert outcome.ttft_p95_s < 3


@pytest.mark.parametrize("policy", POLICIES)
def test_the_failure_of_a_replica_loses_no_request(policy):
    simulation, outcome = run(setup(4, load=0.5, failing=0.25), policy)
    assert all(request.finished_at > request.at for request in simulation.requests)
    assert outcome.sent_again == sum(request.sendings - 1 for request in simulation.requests) > 0
    assert len(simulation.living) == 4
    assert f"{0:012x}" not in simulation.living
    assert all(replica.load == 0 for replica in simulation.living.values())


def test_claims_of_a_replica_that_has_failed_count_no_more():
    _, steady = run(setup(4))
    _, outcome = run(setup(4, load=0.5, failing=0.25))
    assert steady.claims_of_living == steady.claims
    assert 0 < outcome.claims_of_living < outcome.claims


def test_many_documents_cost_neither_memory_nor_time():
    few, many = (Setup(16, Workload(documents, 600, 300), MODEL) for documents in (10_000, 10_000_000))
    started = time.process_time()
    _, outcome = run(many)
    assert time.process_time() - started < 5
    assert outcome.distinct_documents < 600 * (OF_ONE_TOPIC + 1)
    assert _most_bytes(many) < _most_bytes(few) + (32 << 20)


def _most_bytes(setup):
    tracemalloc.start()
    try:
        run(setup, "round robin")
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_requests_take_documents_of_one_topic_and_at_times_another():
    arrivals = make_arrivals(Workload(20_000, 4_000, 2_000, hot_share=0.3))
    own, other = arrivals.documents[:, :OF_ONE_TOPIC], arrivals.documents[:, OF_ONE_TOPIC]
    topics = own // TOPIC_DOCUMENTS
    assert (topics == topics[:, :1]).all()
    assert all(len({*row}) == OF_ONE_TOPIC for row in own.tolist())
    assert 0.2 < (other >= 0).mean() < 0.4
    assert not (own == other[:, None]).any()
    assert 0 <= own.min() <= own.max() < 20_000
    hot = topics[:, 0] == 20_000 // TOPIC_DOCUMENTS // 2
    assert hot[:2000].mean() < 0.01
    assert 0.25 < hot[2000:].mean() < 0.35
    assert (topics[:2000, 0] == 0).mean() == pytest.approx(1 / 7.49, rel=0.2)  # Zipf: one over the sum of 1/rank


def test_documents_have_their_lengths_whoever_asks_first():
    one, two = Corpus(0), Corpus(0)
    rows = make_arrivals(Workload(1_000_000, 20, 0)).documents
    first = {chunk.key: chunk.tokens for row in rows for chunk in one.chunks(row)}
    second = {chunk.key: chunk.tokens for row in rows[::-1] for chunk in two.chunks(row)}
    assert first == second
    assert len(one) == len(first)
    assert all(64 <= tokens <= 2048 for tokens in first.values())


def replica_on(clock, model=MODEL):
    registry, finished = SimulatedRegistry(clock), []
    return SimulatedReplica(f"{0:012x}", "replica-0", model, clock, registry, finished.append), registry, finished


def test_an_engine_computes_one_prompt_at_a_time_and_only_what_is_missing():
    clock = Clock()
    replica, _, finished = replica_on(clock)
    chunks = [Chunk(1, 1000), Chunk(2, 500)]
    first, second = Request(0, chunks, 10), Request(0, chunks[::-1], 1)
    for request in (first, second):
        replica.submit(request)
    clock.run()
    assert first.first_token_at == pytest.approx(MODEL.prefill_s(1500))
    assert second.first_token_at == pytest.approx(first.first_token_at + MODEL.prefill_s(0))
    assert (first.missing_tokens, second.missing_tokens) == (1500, 0)
    assert first.finished_at == pytest.approx(first.first_token_at + 9 * MODEL.token_s)
    assert second.finished_at == second.first_token_at
    assert {*finished} == {first, second}


def test_an_engine_takes_no_more_requests_at_once_than_it_may():
    clock, model = Clock(), EngineModel(max_num_seqs=1)
    replica, *_ = replica_on(clock, model)
    first, second = Request(0, [Chunk(1, 100)], 50), Request(0, [Chunk(2, 100)], 1)
    for request in (first, second):
        replica.submit(request)
    clock.run()
    assert second.first_token_at == pytest.approx(first.finished_at + model.prefill_s(100))


def test_claims_are_published_once_they_can_be_loaded_and_in_batches():
    clock = Clock()
    replica, registry, _ = replica_on(clock)
    chunks = [Chunk(number, 1000) for number in range(100)]
    for start in range(0, 100, 5):
        replica.submit(Request(0, chunks[start : start + 5], 1))
    seen = []
    clock.at(MODEL.prefill_s(5000) - 1e-6, lambda: seen.append(registry.num_claims()[0]))
    clock.at(MODEL.prefill_s(5000) + FLUSH_S, lambda: seen.append(registry.num_claims()[0]))
    clock.run()
    assert seen == [0, 5]
    held = 65_536 // 16 * 16 // 1008  # a document takes 63 pages
    assert registry.num_claims() == (held, 0)
    assert len(registry.claims([key_of(chunks[-1])])[0]) == 1
    assert not registry.claims([key_of(chunks[0])])[0]


def test_a_lease_ends_when_heartbeats_do():
    clock = Clock()
    replica, registry, _ = replica_on(clock)
    beating = iter([True] * 3)
    replica.start(lambda: next(beating, False))
    known = []
    for at in (LEASE_S + 2 * BEAT_S - 0.1, LEASE_S + 4 * BEAT_S):
        clock.at(at, lambda: known.append([each.name for each in registry.replicas()]))
    clock.run()
    assert known == [["replica-0"], []]


def test_the_registry_counts_what_the_real_one_asks_of_redis():
    """As `python -m benchmarks.cluster_redis_memory` counts it."""
    registry = SimulatedRegistry(Clock())
    keys = [key_of(Chunk(number, 1)) for number in range(10)]
    registry.beat(Replica("00", "r", "http://r", (), ""))
    registry.publish("00", {keys[0]: Holding(Tier.DEVICE, 1, 1), keys[1]: None})
    registry.replicas()
    registry.claims(keys)
    every, lookups = registry.forget_traffic()
    assert (every.commands, every.round_trips) == (5 + 4 + 4 + 10, 1 + 1 + 2 + 1)
    registry.replicas()
    again, _ = registry.forget_traffic()
    assert (again.commands, again.round_trips) == (2, 1)
    assert (lookups.commands, lookups.round_trips) == (10, 1)
    assert registry.all.commands == 0


def test_constants_are_those_of_the_real_thing():
    publisher, directory = (
        pytest.importorskip(name) for name in ("replicas.publisher", "app.cluster.router.directory")
    )
    assert (FLUSH_S, BEAT_S) == (publisher.FLUSH_S, publisher.BEAT_S)
    assert router.REFRESH_S == directory.REFRESH_S


def test_a_set_of_documents_has_one_place_by_hash():
    chunks = [Chunk(number, 1) for number in range(5)]
    candidates = [Candidate(str(number), f"replica-{number}") for number in range(8)]
    assert by_hash(chunks, candidates) == by_hash(chunks[::-1], candidates[::-1])


def test_the_command_prints_tables_and_writes_rows_and_a_plot(tmp_path, capsys):
    flags = ["--replicas", "4", "--per-replica", "2", "--output", str(tmp_path), "--load-tokens", "7"]
    assert cluster_simulation.main(["scaling", "failures", "prices", *flags]) == 0
    printed = capsys.readouterr().out
    assert all(word in printed for word in (*POLICIES, "interrupted", "LOAD_TOKENS"))
    written = json.loads((tmp_path / "scaling.json").read_text())
    assert [row["replicas"] for row in written["rows"]] == [2] * len(POLICIES) + [4] * len(POLICIES)
    assert {row["load_tokens"] for row in written["rows"]} == {7}
    assert written["engine"]["max_num_seqs"] == EngineModel().max_num_seqs
    assert (tmp_path / "scaling.png").stat().st_size > 1000
    assert len({row["load_tokens"] for row in json.loads((tmp_path / "prices.json").read_text())["rows"]}) > 5


@pytest.mark.parametrize("wrong", [["--replicas", "1"], ["--per-replica", "0"], ["everything"]])
def test_the_command_says_what_is_wrong(wrong, capsys):
    with pytest.raises(SystemExit, match="2"):
        cluster_simulation.main(wrong)
    assert "error:" in capsys.readouterr().err


def test_memory_of_redis_is_measured_on_a_real_one(tmp_path, capsys):
    measured = pytest.importorskip("benchmarks.cluster_redis_memory")
    if not (shutil.which("redis-server") or shutil.which("valkey-server")):
        pytest.skip("neither redis-server nor valkey-server is installed")
    assert measured.main(["--pairs", "4000", "--json", str(tmp_path / "redis.json")]) == 0
    result = json.loads((tmp_path / "redis.json").read_text())
    assert [row["pairs"] for row in result["memory"]] == [4000] * 3
    assert all(row["bytes_per_pair"] <= measured.BYTES_AT_MOST for row in result["memory"])
    assert result["calls"]["claims of 10 documents"] == {"commands": {"hgetall": 10}, "round_trips": 1}
    assert "bytes per claim" in capsys.readouterr().out
