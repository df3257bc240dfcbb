# SPDX-License-Identifier: Apache-2.0
"""The load workload against servers without a model: requests, records, refusals."""

from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from app.documents.document import Document
from measuring.kit.client import ServerError
from measuring.speed import servers
from measuring.speed.answers import DifferentAnswerError
from measuring.speed.traces import Trace, read_trace, zipf_trace
from measuring.speed.workloads import load
from measuring.speed.workloads.base import Options
from measuring.speed.workloads.load import Load, Sizes
from measuring.speed.workloads.loops import closed_loop
from tests.measuring.fake_server import FakeServer, answer_of
from tests.measuring.helpers import ROUNDS, Fakes, run

CHAT, RAG, CHUNKS = "/v1/chat/completions", "/v1/rag/chat", "/v1/rag/chunks"


class SmallLoad(Load):
    short = Sizes(200, (2, 8), requests=4)


class PooledFakes(Fakes):
    """Pools are as large as flags say. ``states`` has fields of :class:`FakeServer` by the server's name."""

    def __init__(self, stack):
        super().__init__(stack)
        self.states = {}

    def start(self, name, model, flags, folder, *, is_stock):
        self.state = dict(self.states.get(name, {}))
        if flags:
            flag, memory = flags
            assert flag == "--chunk-cache-memory"
            self.state["pages_total"] = int(memory) // self.state.get("page_bytes", FakeServer.page_bytes)
        return super().start(name, model, flags, folder, is_stock=is_stock)


@pytest.fixture
def fakes(monkeypatch):
    with ExitStack() as stack:
        fakes = PooledFakes(stack)
        monkeypatch.setattr(servers, "running", fakes.start)
        monkeypatch.setattr(servers, "SETTLE_S", 0)
        yield fakes


def make(folder, trace=None, seed=0) -> SmallLoad:
    return SmallLoad(Options(Path("model"), (), folder, seed=seed, trace=trace))


async def test_every_round_has_a_sample_of_each_system(fakes, tmp_path):
    samples = await run(make(tmp_path))
    closed, systems = ("concurrency 2", "concurrency 8"), ("stock", "warm", "quarter")
    numbers = range(1, 1 + ROUNDS)
    wanted = [(point, number, system) for point in closed for number in numbers for system in systems]
    assert sorted((each.point, each.round, each.system) for each in samples) == sorted(wanted)
    for each in samples:
        assert (each.workload, set(each.values)) == ("load", {"requests_per_s", "ttft_s", "tpot_s", "latency_s"})
        assert min(each.values.values()) > 0


async def test_requests_are_of_the_sizes_that_are_reported(fakes, tmp_path):
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


async def test_all_systems_get_the_same_requests(fakes, tmp_path):
    await run(make(tmp_path))
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


async def test_each_round_begins_with_another_system(fakes, tmp_path):
    order = []

    async def note(name):
        order.append(name)

    fakes.states = {name: {"before": partial(note, name)} for name in ("stock", "tessera", "quarter")}
    await run(make(tmp_path))
    passes = [order[start : start + 4] for start in range(6, len(order), 4)]  # after the warm-up's 1, 1 and 4
    assert all(len(set(names)) == 1 for names in passes)
    turns = "".join(names[0][0] for names in passes)
    assert turns == "stqstq" + "tqstqs" + "qstqst"
    assert fakes.running == set()


async def test_as_many_requests_at_once_as_the_point_says(fakes, tmp_path, monkeypatch):
    used = []

    async def noted(ask, queries, concurrency):
        used.append((concurrency, len(queries)))
        return await closed_loop(ask, queries, concurrency)

    monkeypatch.setattr(load, "closed_loop", noted)
    await run(make(tmp_path))
    assert used == [(8, 1), (8, 1), (8, 4)] + ([(2, 4)] * 3 + [(8, 4)] * 3) * ROUNDS


async def test_an_answer_that_depends_on_the_pool_is_refused(fakes, tmp_path):
    fakes.states = {"quarter": {"answer": lambda prompt, max_tokens: answer_of(prompt, max_tokens)[::-1]}}
    with pytest.raises(DifferentAnswerError, match="tessera and quarter answered differently"):
        await run(make(tmp_path))


async def test_a_chunk_that_was_not_cached_is_refused(fakes, tmp_path):
    missing = {"index": 0, "status": "filled"}
    fakes.states = {"tessera": {"report": lambda report: {**report, "chunks": [*report["chunks"][1:], missing]}}}
    with pytest.raises(DifferentAnswerError, match="not all hit"):
        await run(make(tmp_path))


async def test_full_attention_is_refused(fakes, tmp_path):
    fakes.states = {"quarter": {"report": lambda report: {**report, "mode": "full"}}}
    with pytest.raises(DifferentAnswerError, match="quarter: a request ran as full"):
        await run(make(tmp_path))


async def test_a_pool_that_cannot_hold_the_chunks_is_an_error(fakes, tmp_path):
    fakes.states = {"tessera": {"pages_total": 1599}}
    with pytest.raises(ServerError, match=r"take 1600 pages.*has 1599 left: raise TESSERA_CHUNK_CACHE_MEMORY"):
        await run(make(tmp_path))
    assert not fakes.servers["tessera"].requests


async def test_a_pool_of_another_size_than_asked_for_is_an_error(fakes, tmp_path):
    fakes.states = {"quarter": {"page_bytes": 2 * FakeServer.page_bytes}}
    with pytest.raises(ServerError, match="quarter: the pool has 200 pages; a quarter of the chunks takes 400"):
        await run(make(tmp_path))


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
    assert second.sizes() == first.sizes()


async def test_a_file_of_requests(fakes, tmp_path):
    """Shorter than the run, with a chunk of its own length that no request wants."""
    trace = Trace("own", 0, (40, 999, 70), ((0,), (2, 0), (2,)))
    workload = make(tmp_path, trace)
    await run(workload)
    (ahead,) = fakes.servers["tessera"].bodies(CHUNKS)
    assert [len(Document(chunk).render()) for chunk in ahead["chunks"]] == [40, 70]
    first, last = ahead["chunks"]
    asked = [tuple(body["chunks"]) for body in fakes.servers["quarter"].bodies(RAG)]
    assert sorted(asked[:4]) == sorted([(first,), (last, first), (last,), (first,)])
    assert workload.sizes()["chunks"] == 2


def test_bounds_are_for_the_generated_requests(tmp_path):
    warm, quarter = make(tmp_path).claims()
    assert (warm.over, warm.under, warm.point, warm.at_least) == ("warm", "stock", "concurrency 8", 5)
    assert (quarter.over, quarter.under, quarter.point, quarter.at_least) == ("quarter", "stock", "concurrency 8", 2)
    own = make(tmp_path, Trace("own", 0, (40,), ((0,),))).claims()
    assert [claim.at_least for claim in own] == [None] * 2


@pytest.mark.parametrize("sizes", [Load.short, Load.long])
def test_a_quarter_of_the_chunks_is_more_than_what_all_clients_hold_at_once(sizes):
    """Or a request in mode chunked fails, since nothing can be evicted for it."""
    requests = zipf_trace(0, sizes.chunks, 256, 1000).requests
    assert sizes.chunks // 4 > max(sizes.concurrencies) * max(map(len, requests))
