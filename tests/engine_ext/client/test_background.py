# SPDX-License-Identifier: Apache-2.0
"""Ingestion in rounds: size of a round, and pauses for other requests; in virtual time."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.errors import ChunkCacheError
from cache.positions.layout import Chunk, ChunkedPrompt, pack
from cache.segments.hashing import CacheScope
from engine_ext.client.background import (
    BUSY_ROUND_TOKENS,
    IDLE_ROUND_TOKENS,
    PAUSE,
    BackgroundFills,
    Ingested,
    Ingestion,
    _Queue,
)
from engine_ext.client.engine import ChunkEngine
from engine_ext.client.request import CacheOptions, ResolvedRequest
from tests.cache.helpers import PAGE_TOKENS
from tests.engine_ext.fake_llm import FakeLLM, chunk, make_engine, turns
from tests.support.virtual_time import virtual_time

SYSTEM = (1, 2, 3)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Coroutine[Any, Any, Any]], Any]]:
    """Runs a coroutine in virtual time."""
    with virtual_time(monkeypatch, "engine_ext.client.background") as run:
        yield run


def ingestion(keep: Callable[..., None] = lambda chunk, entry: None, opening: Any = None) -> Ingestion:
    frame = ChunkedPrompt(SYSTEM, (Chunk(pack((8,))),), (9,), opening)
    return Ingestion(ResolvedRequest(frame, CacheOptions(), CacheScope()), keep)


def distinct(lengths: Sequence[int]) -> list[Chunk]:
    return [chunk(100_000 * (i + 1), length) for i, length in enumerate(lengths)]


async def results(background: BackgroundFills, chunks: Sequence[Chunk], **options: Any) -> list[Ingested]:
    return [result async for result in background.run(ingestion(**options), chunks)]


class Rounds:
    """Makes fills take a millisecond per token, concurrently within a round; records rounds."""

    def __init__(self, engine: ChunkEngine, llm: FakeLLM) -> None:
        self.background, self.spans, self.tokens = engine.background, [], []
        self._round = engine.background._round
        engine.background._round = self.noted
        llm.work = lambda num_tokens: asyncio.sleep(num_tokens / 1000)

    async def noted(self, of: Ingestion, chunks: list[Chunk]) -> list[Ingested]:
        started = asyncio.get_running_loop().time()
        done = await self._round(of, chunks)
        self.spans.append((started, asyncio.get_running_loop().time()))
        self.tokens.append(sum(result.chunk.num_tokens for result in done))
        return done

    @property
    def gaps(self) -> list[float]:
        """Pauses between consecutive rounds."""
        return [after[0] - before[1] for before, after in zip(self.spans, self.spans[1:], strict=False)]


def large_engine() -> tuple[ChunkEngine, FakeLLM]:
    return make_engine(num_pages=20_000, max_running=1000)


@given(st.lists(st.integers(1, 50)), st.lists(st.integers(0, 120), min_size=1), st.randoms())
def test_takes_are_the_chunks_in_order_and_exceed_the_budget_only_by_one_alone(lengths, budgets, random):
    chunks = distinct(lengths)
    queue, taken = _Queue(chunks), []
    for turn in range(1000):
        budget = budgets[turn % len(budgets)]
        now = queue.take(budget)
        if not now:
            break
        assert len(now) == 1 or sum(c.num_tokens for c in now) <= budget
        rest = chunks[len(taken) + len(now) :]
        assert not rest or sum(c.num_tokens for c in [*now, rest[0]]) > budget
        kept = random.randrange(1, len(now) + 1)
        queue.put_back(now[kept:])
        taken += now[:kept]
    assert taken == chunks


def test_an_idle_engine_gets_large_rounds_without_a_pause(run):
    engine, llm = large_engine()
    rounds = Rounds(engine, llm)
    done = run(results(rounds.background, distinct([1000] * 20)))
    assert [result.status for result in done] == ["filled"] * 20
    assert rounds.tokens == [IDLE_ROUND_TOKENS // 1000 * 1000] * 2 + [4000]
    assert rounds.gaps == [0, 0]


def test_beside_requests_rounds_are_small_and_leave_them_most_of_the_time(run):
    engine, llm = large_engine()
    rounds = Rounds(engine, llm)
    llm.num_others = 1
    run(results(rounds.background, distinct([200, 200, 200, 5000, 10, 20])))
    assert rounds.tokens == [400, 200, 5000, 30]
    assert all(tokens <= BUSY_ROUND_TOKENS for tokens in rounds.tokens if tokens != 5000)
    for gap, (started, ended) in zip(rounds.gaps, rounds.spans, strict=False):
        assert gap == pytest.approx(PAUSE * (ended - started))


def test_a_pause_ends_soon_after_the_last_request(run):
    engine, llm = large_engine()
    rounds = Rounds(engine, llm)
    llm.num_others = 1

    async def leave() -> None:
        ingesting = asyncio.create_task(results(rounds.background, distinct([5000, 5000])))
        while not rounds.spans:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.5)
        llm.num_others = 0
        await ingesting

    run(leave())
    (gap,) = rounds.gaps
    assert 0.5 <= gap < 0.55


def test_two_ingestions_take_turns(run):
    engine, llm = large_engine()
    rounds, order = Rounds(engine, llm), []

    async def one(name: str, chunks: list[Chunk]) -> None:
        async for _ in rounds.background.run(ingestion(), chunks):
            order.append(name)

    async def both() -> None:
        chunks = distinct([8000] * 6)
        await asyncio.gather(one("a", chunks[:3]), one("b", chunks[3:]))

    run(both())
    assert order == ["a", "b", "a", "b", "a", "b"]
    assert rounds.gaps == [0] * 5, "one round at a time"


@pytest.mark.parametrize("num_pages", [6, 8, 16, 100])
def test_rounds_that_the_pool_can_not_hold_are_cut_short(run, num_pages):
    """Twelve chunks of one page, more than the pool's pages in one round's tokens, then one chunk of four."""
    engine, llm = make_engine(num_pages)
    rounds = Rounds(engine, llm)
    done = run(results(rounds.background, distinct([1] * 12 + [4 * PAGE_TOKENS])))
    assert [result.error for result in done] == [None] * 13
    assert [result.chunk for result in done] == distinct([1] * 12 + [4 * PAGE_TOKENS])
    assert sum(llm.computed.values()) >= 13
    assert engine.cache.manager.is_idle


def test_a_chunk_that_does_not_fit_the_pool_or_the_model_fails_alone(run):
    engine, llm = make_engine(num_pages=6)
    done = run(results(engine.background, distinct([3, 6 * PAGE_TOKENS, 3])))
    assert [result.status for result in done] == ["filled", None, "filled"]
    assert "more pages of 4 tokens" in done[1].error
    llm.model_config.max_model_len = 10
    done = run(results(engine.background, distinct([6, 7, 3])))
    assert [result.error for result in done] == [None, "10 tokens don't fit the model's context length of 10", None]


def test_a_lost_fill_and_what_is_not_kept_fail_with_the_reason(run):
    engine, llm = make_engine()
    chunks = distinct([3, 3, 3])

    def keep(chunk: Chunk, entry: Any) -> None:
        if chunk is chunks[1]:
            raise ChunkCacheError("no room for pins")

    llm.loses = lambda prompt_ids: prompt_ids[-3:] == chunks[2].token_ids
    kept, refused, lost = run(results(engine.background, chunks, keep=keep))
    assert (kept.status, kept.error) == ("filled", None)
    assert (refused.status, refused.error) == (None, "no room for pins")
    assert refused.key
    assert (lost.status, "nothing saved" in lost.error) == (None, True)


def test_when_the_server_stops_no_more_is_begun(run):
    """The first round of chunks is computed; the others are reported as refused."""
    engine, llm = make_engine()

    async def stopped() -> list[str | None]:
        errors = []
        async for result in engine.background.run(ingestion(), distinct([2] * 40)):
            errors.append(result.error)
            engine.background.stop()
        return errors

    errors = run(stopped())
    computed = errors.index("the server is stopping")
    assert 0 < computed < 40
    assert errors == [None] * computed + ["the server is stopping"] * (40 - computed)
    assert sum(llm.computed.values()) == computed + 1  # the system segment


@pytest.mark.parametrize("leaves_after", range(20))
def test_a_client_that_leaves_at_any_turn_leaves_nothing_held(run, leaves_after):
    engine, llm = make_engine()

    async def leave() -> None:
        first = asyncio.create_task(results(engine.background, distinct([3, 30, 40, 50, 3])))
        second = asyncio.create_task(results(engine.background, distinct([3, 30, 40, 50, 3])))
        await turns(leaves_after)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        assert [result.error for result in await second] == [None] * 5
        await turns(5)

    run(leave())
    assert engine.cache.manager.is_idle
    assert llm.running == set()
    engine.cache.manager.check_integrity()
