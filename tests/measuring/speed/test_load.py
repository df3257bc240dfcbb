# SPDX-License-Identifier: Apache-2.0
"""The load workload against servers without a model: requests, records, refusals."""

import asyncio
from functools import partial
from pathlib import Path

import pytest

from app.documents.document import Document
from measuring.kit.client import Answer, ServerError
from measuring.speed.query import Query
from measuring.speed.traces import Trace, read_trace, zipf_trace
from measuring.speed.workloads import load
from measuring.speed.workloads.base import Options
from measuring.speed.workloads.load import Load
from measuring.speed.workloads.loops import Outcome, closed_loop
from tests.measuring.fake_server import CHAT, CHUNKS, RAG
from tests.measuring.helpers import ROUNDS, run

pytestmark = pytest.mark.usefixtures("small")


def make(folder, trace=None, seed=0) -> Load:
    return Load(Options(Path("model"), (), folder, seed=seed, trace=trace))


async def test_answers_of_a_pass_are_in_the_order_of_the_queries():
    queries, released = [Query("", (), f"question {i}", 4) for i in range(8)], asyncio.Event()

    async def ask(query):
        if query is queries[0]:
            await released.wait()
        if query is queries[-1]:
            released.set()
        return Answer(text=query.question)

    outcome = await closed_loop(ask, queries, concurrency=2)
    assert [answer.text for answer in outcome.answers] == [query.question for query in queries]


def test_figures_of_a_pass():
    answers = [Answer(ttft_s=ttft, latency_s=2 * ttft) for ttft in (0.1, 0.4, 0.2)]
    values = Outcome(answers, seconds=1.5).values
    assert (values["requests_per_s"], values["ttft_s"], values["latency_s"]) == (2, 0.2, 0.4)


async def test_requests_are_of_the_sizes_that_are_reported_and_the_same_for_all_systems(fakes, tmp_path):
    workload = make(tmp_path)
    await run(workload)
    sizes = workload.sizes()
    (ahead,) = fakes.servers["tessera"].bodies(CHUNKS)
    assert len(set(ahead["chunks"])) == sizes["chunks"] == 200
    assert {len(Document(chunk).render()) for chunk in ahead["chunks"]} == {sizes["chunk_tokens"]} == {256}
    bodies = fakes.servers["tessera"].bodies(RAG)
    for body in bodies:
        assert len(set(body["chunks"])) == 5
        assert set(body["chunks"]) <= set(ahead["chunks"])
        assert body["system"] == ahead["system"]
        assert body["cache"]["namespace"] == ahead["cache"]["namespace"]
        assert (len(body["system"]), len(body["question"]), body["max_tokens"]) == (64, 32, 16)
    assert len({body["question"] for body in bodies}) == len(bodies)
    quarter, tessera = ([prompt(body) for body in fakes.servers[name].bodies(RAG)] for name in ("quarter", "tessera"))
    stock = [tuple(message["content"] for message in body["messages"]) for body in fakes.servers["stock"].bodies(CHAT)]
    assert len(stock) == len(set(stock)) == 1 + 4 * 2 * ROUNDS
    assert set(stock) == set(tessera)
    assert len(quarter) == 4 * (1 + 2 * ROUNDS)
    assert set(quarter) - set(stock) <= set(quarter[:4])  # only of the warm-up


def prompt(body):
    """As stock vLLM has it: the contents of the messages."""
    return body["system"], "".join(Document(chunk).render() for chunk in body["chunks"]) + body["question"]


async def test_the_small_pool_holds_a_quarter(fakes, tmp_path):
    await run(make(tmp_path))
    tessera, quarter = fakes.servers["tessera"], fakes.servers["quarter"]
    assert quarter.pages_total == 200 * 8 / 4
    assert fakes.flags["quarter"] == ("--chunk-cache-memory", str(400 * tessera.page_bytes))
    assert set(tessera.lookups) == {"hit"}
    assert set(quarter.lookups) == {"hit", "filled"}
    assert not tessera.cached


async def test_each_round_begins_with_another_system_and_has_as_many_requests_at_once_as_the_point_says(
    fakes, tmp_path, monkeypatch
):
    order, used = [], []

    async def note(name):
        order.append(name)

    async def noted(ask, queries, concurrency):
        used.append((concurrency, len(queries)))
        return await closed_loop(ask, queries, concurrency)

    monkeypatch.setattr(load, "closed_loop", noted)
    fakes.states = {name: {"before": partial(note, name)} for name in ("stock", "tessera", "quarter")}
    await run(make(tmp_path))
    assert used == [(8, 1), (8, 1), (8, 4)] + ([(2, 4)] * 3 + [(8, 4)] * 3) * ROUNDS
    passes = [order[start : start + 4] for start in range(6, len(order), 4)]  # after the warm-up's 1, 1 and 4
    assert all(len(set(names)) == 1 for names in passes)
    assert "".join(names[0][0] for names in passes) == "stqstq" + "tqstqs" + "qstqst"
    assert fakes.running == set()


@pytest.mark.parametrize(
    ("name", "state", "words"),
    [
        ("tessera", {"pages_total": 1599}, r"take 1600 pages.*has 1599 left: raise TESSERA_CHUNK_CACHE_MEMORY"),
        ("quarter", {"pages_total": 200}, "quarter: the pool has 200 pages; a quarter of the chunks takes 400"),
    ],
)
async def test_a_pool_of_a_wrong_size_is_an_error(name, state, words, fakes, tmp_path):
    fakes.states = {name: state}
    with pytest.raises(ServerError, match=words):
        await run(make(tmp_path))
    assert not fakes.servers[name].requests


async def test_the_trace_that_is_written_repeats_the_requests(fakes, tmp_path):
    first = make(tmp_path, seed=3)
    await run(first)
    before = dict(fakes.servers)
    second = make(tmp_path, trace=read_trace(tmp_path / load.TRACE_FILE), seed=4)
    await run(second)
    for name, server in fakes.servers.items():
        assert server is not before[name]
        assert sorted(map(str, server.requests)) == sorted(map(str, before[name].requests))
    assert second.claims() == first.claims()
    assert all(claim.at_least for claim in first.claims())
    assert second.sizes() == first.sizes()


async def test_a_file_of_requests(fakes, tmp_path):
    """Shorter than the run, with a chunk of its own length that no request wants."""
    workload = make(tmp_path, Trace("own", 0, (40, 999, 70), ((0,), (2, 0), (2,))))
    await run(workload)
    (ahead,) = fakes.servers["tessera"].bodies(CHUNKS)
    assert [len(Document(chunk).render()) for chunk in ahead["chunks"]] == [40, 70]
    first, last = ahead["chunks"]
    asked = [tuple(body["chunks"]) for body in fakes.servers["quarter"].bodies(RAG)]
    assert sorted(asked[:4]) == sorted([(first,), (last, first), (last,), (first,)])
    assert workload.sizes()["chunks"] == 2
    assert [claim.at_least for claim in workload.claims()] == [None] * 2  # bounds are for the generated requests


@pytest.mark.parametrize("sizes", [Load.short, Load.long])
def test_a_quarter_of_the_chunks_is_more_than_what_all_clients_hold_at_once(sizes):
    """Or a request in mode chunked fails, since nothing can be evicted for it."""
    requests = zipf_trace(0, sizes.chunks, 256, 1000).requests
    assert sizes.chunks // 4 > max(sizes.concurrencies) * max(map(len, requests))
