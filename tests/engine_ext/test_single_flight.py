# SPDX-License-Identifier: Apache-2.0
"""Requests with the same missing chunks, without an engine, leaving or failing at every point in time.

On each load, the fake engine compares the page's tag and tokens with those last saved there.
"""

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.eviction.removal import Removal
from cache.positions.layout import ChunkedPrompt
from cache.report import Report
from cache.segments.index import EntryState
from engine_ext.client.engine import ChunkEngine
from engine_ext.client.request import CALLER, CacheOptions, Caller
from engine_ext.wire.vllm_compat import GracefulHTTPError
from tests.engine_ext.fake_llm import FakeLLM, ask, chunk, make_engine, turns
from tests.support.variables import having

SYSTEM = (1, 2, 3, 4, 5)
A, B, C, D = chunk(100, 3), chunk(200, 9), chunk(300, 6), chunk(400, 14)
OFFERED = (A, B, C, D)


def prompt(*chunks: Any, opening: tuple[int, ...] | None = None) -> ChunkedPrompt:
    return ChunkedPrompt(SYSTEM, chunks, (9, 9), opening)


def statuses(report: Report) -> list[str | None]:
    return [chunk.status for chunk in report.chunks]


def assert_idle(engine: ChunkEngine, llm: FakeLLM) -> None:
    assert engine.cache.manager.is_idle
    engine.cache.manager.check_integrity()
    assert engine.cache.reason is None
    assert (engine.cache.fills.num_running, engine.cache.fills.num_queued, llm.running) == (0, 0, set())


@pytest.mark.parametrize("busy", [None, Caller("default")])
async def test_while_many_fills_of_a_tenant_wait_it_gets_no_more_but_others_do(busy: Caller | None) -> None:
    """Whether or not vLLM asks for admission beforehand; and its own don't come before another's."""
    engine, llm = make_engine(max_running=1, max_queued=2)
    many = prompt(A, B, C, *(chunk(1000 * i, 3) for i in range(1, 9)))
    with having(CALLER, busy):
        waiting = asyncio.create_task(ask(engine, many))
        await turns(3)
        assert engine.cache.fills.num_queued >= 2
        with pytest.raises(GracefulHTTPError, match="too many chunks wait") as raised:
            await ask(engine, prompt(D))
    assert raised.value.http_status == 503
    with having(CALLER, Caller("quiet")):
        assert statuses(await ask(engine, prompt(D), CacheOptions(namespace="quiet"))) == ["filled"]
    assert not waiting.done()
    await waiting
    with having(CALLER, busy):
        assert statuses(await ask(engine, prompt(D))) == ["filled"]
    assert_idle(engine, llm)


def noting(llm: FakeLLM) -> list[int]:
    """Records the tokens that each later request computes."""
    computed: list[int] = []

    async def work(num_tokens: int) -> None:
        computed.append(num_tokens)
        await turns(3)

    llm.work = work
    return computed


async def test_the_system_segment_is_computed_once_and_loaded_by_the_other_fills():
    engine, llm = make_engine()
    computed = noting(llm)
    await ask(engine, prompt(A, B, C))
    assert computed == [5 + 3, 9, 6, 2]
    await ask(engine, prompt(D))
    assert computed[4:] == [14, 2]
    await ask(engine, prompt(D, opening=(1, 2)))
    assert computed[6:] == [2 + 14, 2]


async def test_a_fill_whose_prefix_was_given_up_meanwhile_computes_it():
    engine, llm = make_engine(max_running=1)
    await ask(engine, prompt(A))
    computed = noting(llm)
    starter = asyncio.create_task(ask(engine, prompt(B, C)))
    await turns(2)
    engine.cache.manager.clear()
    other = asyncio.create_task(ask(engine, prompt(C)))
    await turns(1)
    starter.cancel()
    assert (await other).mode == "chunked"
    assert 5 + 6 in computed
    assert_idle(engine, llm)


@pytest.mark.parametrize("max_running", [1, 4])
@pytest.mark.parametrize("others_come_after", [0, 1, 3, 6])
async def test_whoever_started_the_fills_may_leave_at_any_turn(max_running, others_come_after):
    aborted = 0
    for leaves_after in range(30):
        engine, llm = make_engine(max_running=max_running)
        starter = asyncio.create_task(ask(engine, prompt(A, B, C)))
        others: list[asyncio.Task[Report]] = []
        for turn in range(max(leaves_after, others_come_after) + 1):
            if turn == others_come_after:
                others = [asyncio.create_task(ask(engine, prompt(*order))) for order in ((C, B), (A, C, B))]
            if turn == leaves_after:
                starter.cancel()
            await turns(1)
        reports = await asyncio.gather(*others)
        await asyncio.gather(starter, return_exceptions=True)
        await turns(5)
        assert [report.mode for report in reports] == ["chunked"] * 2
        assert llm.computed == {SYSTEM: 1, A.token_ids: 1, B.token_ids: 1, C.token_ids: 1}
        assert engine.cache.manager.metrics.fills["failed"] == 0
        aborted += engine.cache.manager.metrics.fills["aborted"]
        assert_idle(engine, llm)
    assert aborted or others_come_after < 3, "no fill was ever given up; the test shows less than it says"


async def test_an_engine_error_in_a_fill_is_a_lost_fill():
    engine, llm = make_engine()

    async def breaks(num_tokens: int) -> None:
        await turns(2)
        if num_tokens > len(SYSTEM) + 2:
            raise RuntimeError("the engine is on fire")

    llm.work = breaks
    with pytest.raises(RuntimeError):  # full attention meets the same engine
        await ask(engine, prompt(A, B))
    assert engine.cache.manager.metrics.fills == {"failed": 4}
    assert_idle(engine, llm)


Event = dict[str, Any]
REQUEST = st.fixed_dictionaries(
    {
        "chunks": st.lists(st.sampled_from(OFFERED), min_size=1, max_size=3),
        "opening": st.sampled_from([None, (), SYSTEM[:2]]),
        "namespace": st.sampled_from(["one", "two"]),
        "comes": st.integers(0, 25),
        "stays": st.integers(0, 25) | st.none(),
    }
)
DISTURBANCE = st.tuples(st.integers(0, 40), st.sampled_from(["clear", "clear one", "delete", "pin", "expire"]))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    requests=st.lists(REQUEST, min_size=1, max_size=8),
    disturbances=st.lists(DISTURBANCE, max_size=8),
    lost=st.sets(st.integers(0, 15), max_size=5),
    num_pages=st.sampled_from([8, 14, 400]),
    max_running=st.sampled_from([1, 3]),
)
def test_whatever_happens_meanwhile_requests_load_what_they_asked_for(
    requests, disturbances, lost, num_pages, max_running
):
    asyncio.run(disturbed(requests, disturbances, lost, num_pages, max_running))


async def disturbed(
    requests: list[Event], disturbances: list[tuple[int, str]], lost: set[int], num_pages: int, max_running: int
) -> None:
    """Requests start and leave, saves get lost, and entries are dropped, each at its turn."""
    engine, llm = make_engine(num_pages, max_running=max_running)
    fills = iter(range(1000))
    llm.loses = lambda prompt_ids: prompt_ids[-2:] != (9, 9) and next(fills) in lost
    tasks: dict[int, asyncio.Task[Report]] = {}
    for turn in range(80):
        for i, request in enumerate(requests):
            if turn == request["comes"]:
                options = CacheOptions(namespace=request["namespace"])
                wanted = prompt(*request["chunks"], opening=request["opening"])
                tasks[i] = asyncio.create_task(ask(engine, wanted, options))
            if request["stays"] is not None and turn == request["comes"] + request["stays"]:
                tasks[i].cancel()
        for _, what in filter(lambda disturbance: disturbance[0] == turn, disturbances):
            disturb(engine, what)
        await turns(1)
        engine.cache.manager.check_integrity()
    results = await asyncio.gather(*tasks.values(), return_exceptions=True)
    await turns(10)
    for result in results:
        assert isinstance(result, Report | asyncio.CancelledError), result
        if isinstance(result, Report) and result.mode == "full":
            assert_explained(result.reason, lost, num_pages)
    assert_idle(engine, llm)


def assert_explained(reason: str | None, lost: set[int], num_pages: int) -> None:
    assert reason is not None
    if "more pages of 4 tokens" in reason:
        assert num_pages < 400, "these always fit"
    else:
        assert reason.startswith("a fill request failed")
        assert lost


def disturb(engine: ChunkEngine, what: str) -> None:
    manager = engine.cache.manager
    oldest = next((entry for entry in manager.index), None)
    if what == "clear":
        manager.clear()
    elif what == "clear one":
        manager.clear("one")
    elif oldest is None:
        return
    elif what == "delete":
        manager.detach(oldest, Removal.DELETED)
    elif what == "pin" and oldest.state is EntryState.READY:
        if oldest.num_pages <= manager.config.num_pages // 2 and not oldest.pinned:
            manager.retain(oldest, pinned=True, expires_at=None)
    elif what == "expire":
        manager.retain(oldest, pinned=oldest.pinned, expires_at=0.0)
        manager.expire()
