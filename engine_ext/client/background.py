# SPDX-License-Identifier: Apache-2.0
"""Chunks computed ahead of time, in the background of requests."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from uuid import uuid4

from vllm.v1.engine.async_llm import AsyncLLM

from cache.errors import ChunkCacheError, FullAttentionError
from cache.lease import ChunkStatus, Lease
from cache.positions.layout import Chunk, PositionStrategy
from cache.segments.index import ChunkKVCache
from engine_ext.chunks.cache_off import CacheOff
from engine_ext.chunks.chunk_cache import ChunkCache, FillTask
from engine_ext.client.position_limit import trained_positions
from engine_ext.client.request import ResolvedRequest, plain_salt
from engine_ext.client.segments import lease
from engine_ext.wire.vllm_compat import num_unfinished_requests

IDLE_ROUND_TOKENS, BUSY_ROUND_TOKENS = 8192, 512
"""Tokens computed at once: few while an answer is being computed, whose next token waits for them."""
PAUSE = 3
"""Length of the pause after a round beside running requests, in lengths of the round."""
LOAD_PAUSE = 9
"""Length of the pause if nothing was computed: moving KV takes memory bandwidth from every step."""
_LOWEST_PRIORITY = 1 << 30

Keep = Callable[[Chunk, ChunkKVCache], None]
"""Called with each chunk that can be loaded; raises :class:`ChunkCacheError` if it can't be retained."""


@dataclass(frozen=True, slots=True)
class Ingested:
    """Result of one chunk. Without ``status`` it is not retained, and ``error`` says why."""

    chunk: Chunk
    key: str | None = None
    status: ChunkStatus | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Ingestion:
    """Chunks to compute behind the prefix of ``frame``, whose own chunks are placeholders."""

    frame: ResolvedRequest
    keep: Keep

    def request(self, chunk: Chunk) -> ResolvedRequest:
        """A request over this chunk alone."""
        assert self.frame.prompt is not None
        options = replace(self.frame.options, position_strategy=PositionStrategy.SHARED, recompute=0.0, reread=0.0)
        return replace(self.frame, prompt=replace(self.frame.prompt, chunks=(chunk,)), options=options, refusal=None)


class BackgroundFills:
    """Runs ingestions in rounds, one round at a time over all of them."""

    def __init__(self, llm: AsyncLLM, cache: ChunkCache | CacheOff) -> None:
        self._llm = llm
        self._cache = cache
        self._turn = asyncio.Lock()
        self._pause_until = 0.0
        self.is_stopping = False

    def stop(self) -> None:
        """Begins no further round; safe in any thread."""
        self.is_stopping = True

    async def run(self, ingestion: Ingestion, chunks: Iterable[Chunk]) -> AsyncIterator[Ingested]:
        """The chunks' results, in order, as rounds end."""
        queue = _Queue(chunks)
        while True:
            async with self._turn:
                await self._pause()
                todo = queue.take(self._round_tokens())
                if not todo:
                    return
                started = time.monotonic()
                results = await self._round(ingestion, todo)
                queue.put_back(todo[len(results) :])
                ended = time.monotonic()
                is_computed = any(result.status is ChunkStatus.FILLED for result in results)
                self._pause_until = ended + (PAUSE if is_computed else LOAD_PAUSE) * (ended - started)
            for result in results:
                yield result

    async def _pause(self) -> None:
        """Waits for the end of the pause, or until the engine is idle."""
        while not self.is_stopping and self._is_busy() and (left := self._pause_until - time.monotonic()) > 0:
            await asyncio.sleep(min(left, 0.02))

    def _is_busy(self) -> bool:
        """Whether the engine has requests. Between rounds none is an ingestion's."""
        return bool(num_unfinished_requests(self._llm))

    def _round_tokens(self) -> int:
        most = BUSY_ROUND_TOKENS if self._is_busy() else IDLE_ROUND_TOKENS
        return min(most, self._cache.num_tokens // 4)

    async def _round(self, ingestion: Ingestion, chunks: list[Chunk]) -> list[Ingested]:
        """Results of the first chunks, at least one, that the pool can hold together."""
        if self.is_stopping:
            return [Ingested(chunk, error="the server is stopping") for chunk in chunks]
        leases: dict[int, _Started] = {}
        results: dict[int, Ingested] = {}
        name = f"ingest-{uuid4().hex}"
        try:
            for i, chunk in enumerate(chunks):
                try:
                    leases[i] = self._start(ingestion.request(chunk), f"{name}-{i}")
                except FullAttentionError as error:
                    if error.kind == "capacity" and leases:
                        break  # this round's chunks can be evicted in the next round
                    results[i] = Ingested(chunk, error=str(error))
            for i, started in leases.items():
                results[i] = await _finish(ingestion.keep, chunks[i], started)
            return [results[i] for i in range(len(results))]
        finally:
            for started in leases.values():
                started.cache.release(started.lease)

    def _start(self, request: ResolvedRequest, name: str) -> "_Started":
        prompt = request.chunked()
        (chunk,) = prompt.chunks
        num_tokens = prompt.num_before(chunk) + chunk.num_tokens
        limit = trained_positions(self._llm.model_config)
        if num_tokens >= limit:
            raise FullAttentionError("too long", f"{num_tokens} tokens don't fit the model's context length of {limit}")
        placed, leased = lease(self._cache, request)
        cache, salt = placed.cache, plain_salt(self._cache.hasher, request.scope)
        kwargs = {"lora_request": request.lora_request, **self._priority()}
        return _Started(cache, leased, cache.fills.start(leased, name, salt, {}, **kwargs))

    def _priority(self) -> dict[str, int]:
        scheduler = self._llm.vllm_config.scheduler_config
        return {"priority": _LOWEST_PRIORITY} if scheduler.policy == "priority" else {}


@dataclass(frozen=True, slots=True)
class _Started:
    """A chunk that is leased and being filled."""

    cache: ChunkCache
    lease: Lease
    tasks: list[FillTask]


async def _finish(keep: Keep, chunk: Chunk, started: _Started) -> Ingested:
    held = started.lease
    (segment,) = held.chunks
    entry = segment.entry
    try:
        results = await started.cache.fills.wait(held, started.tasks)
        if entry.detached:
            raise ChunkCacheError("it was removed while it was computed")
        keep(chunk, entry)
    except (FullAttentionError, ChunkCacheError) as error:
        return Ingested(chunk, str(entry.key), error=str(error))
    sources = [result.source for job, result in zip(held.fills, results, strict=True) if entry in job.entries]
    status = sources[0].status if sources and sources[0] is not None else segment.status
    return Ingested(chunk, str(entry.key), status)


class _Queue:
    """Chunks still to be computed."""

    def __init__(self, chunks: Iterable[Chunk]) -> None:
        self._chunks = deque(chunks)

    def take(self, num_tokens: int) -> list[Chunk]:
        """The next chunk, and further chunks up to ``num_tokens`` in all."""
        taken: list[Chunk] = []
        while self._chunks and (not taken or self._chunks[0].num_tokens <= num_tokens):
            taken.append(self._chunks.popleft())
            num_tokens -= taken[-1].num_tokens
        return taken

    def put_back(self, chunks: Sequence[Chunk]) -> None:
        """Returns chunks to the front."""
        self._chunks.extendleft(reversed(chunks))
