# SPDX-License-Identifier: Apache-2.0
"""The comparison of eviction policies: its pool, what it counts, its command, and the choice that rests on it."""

import json

import pytest

from benchmarks import eviction
from benchmarks.eviction import FIXED_MS, MS_PER_TOKEN, POLICIES, POOL_SHARES, Chunk, Pool, replay
from benchmarks.traces import TRACE_NAMES, Trace, make_trace
from cache.eviction import make_policy, prefill_cost


def run(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["eviction", *map(str, arguments)])
    return eviction.main()


def test_a_pool_holds_what_is_requested_together():
    one, two, three = (Chunk(key, 16) for key in range(3))
    pool = Pool(2, make_policy("lru"))
    assert pool.request([one, two]) == [one, two]
    assert pool.request([two, one]) == []
    assert pool.request([three, two]) == [three]  # spares two, although it was used least recently
    assert pool.request([two]) == []


def test_a_request_that_does_not_fit_changes_nothing():
    one, two, three = (Chunk(key, 16) for key in range(3))
    pool = Pool(2, make_policy("lru"))
    pool.request([one, two])
    assert pool.request([one, two, three]) == [one, two, three]
    assert pool.request([one, two]) == []


@pytest.mark.parametrize("policy", POLICIES)
def test_counts(policy):
    trace = Trace("own", 0, (64, 192), ((0, 1), (0,), (1,)))
    result = replay(trace, policy, pool_share=1)
    assert (result.chunk_hits, result.token_hits) == (0.5, 0.5)
    assert result.ttft_ms == pytest.approx(
        FIXED_MS + MS_PER_TOKEN * (prefill_cost(64, 64) + prefill_cost(64, 192)) / len(trace.requests)
    )


@pytest.mark.parametrize("name", TRACE_NAMES)
def test_the_default_is_no_worse_than_lru(name):
    trace = make_trace(name, 0, 3000)
    lru, chosen = (replay(trace, policy, 0.25) for policy in ("lru", "s3fifo"))
    assert chosen.chunk_hits >= lru.chunk_hits
    assert chosen.ttft_ms <= lru.ttft_ms


def test_the_command_prints_a_table_and_writes_every_replay(monkeypatch, capsys, tmp_path):
    assert run(monkeypatch, "--requests", 100, "--seeds", 2, "--json", tmp_path / "out.json") == 0
    printed = capsys.readouterr().out
    assert all(word in printed for word in (*TRACE_NAMES, *POLICIES, "modelled"))
    results = json.loads((tmp_path / "out.json").read_text())
    assert len(results) == len(TRACE_NAMES) * len(POOL_SHARES) * len(POLICIES) * 2
    assert {result["seed"] for result in results} == {0, 1}


def test_the_command_replays_a_file(monkeypatch, capsys, tmp_path):
    path = tmp_path / "trace.jsonl"
    make_trace("zipf", 7, 20).write(path)
    assert run(monkeypatch, "--trace", path) == 0
    assert "zipf" in capsys.readouterr().out
    path.write_text("")
    with pytest.raises(SystemExit, match="2"):
        run(monkeypatch, "--trace", path)
    assert "line 1: no header" in capsys.readouterr().err
