# SPDX-License-Identifier: Apache-2.0
"""Chunks computed ahead of time, beside the requests that somebody waits for."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING
from uuid import uuid4

from cache.errors import ChunkCacheError
from cache.hashing import CacheScope
from cache.index import ChunkKVCache
from cache.layout import Chunk, ChunkedPrompt, PositionStrategy
from cache.lease import ChunkStatus, Lease
from engine_ext.chunks.fills import FillTask
from engine_ext.wire.request import FullAttentionError
from engine_ext.wire.vllm_compat import num_unfinished_requests

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

    from engine_ext.client.engine import ChunkEngine

IDLE_ROUND_TOKENS, BUSY_ROUND_TOKENS = 8192, 512
"""Tokens computed at once: few while somebody's answer is being computed, since its next token waits for them."""
PAUSE = 3
"""After a round beside running requests comes a pause of so many times its length: they keep most of the engine."""
LOAD_PAUSE = 9
"""The same where nothing was computed: moving KV takes memory bandwidth from every step, and nobody waits for it."""
_LOWEST_PRIORITY = 1 << 30

Keep = Callable[[Chunk, ChunkKVCache], None]
"""Called with each chunk when it can be loaded; raises :class:`ChunkCacheError` if it can't be kept as asked."""


@dataclass(frozen=True, slots=True)
class Ingested:
    """What became of one chunk. Without a ``status`` it is not cached as asked, and ``error`` says why."""

    chunk: Chunk
    key: str | None = None
    status: ChunkStatus | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Ingestion:
    """Chunks to compute behind ``frame``'s prefix; the chunks of ``frame`` itself stand for these."""

    frame: ChunkedPrompt
    scope: CacheScope
    cache_salt: str | None
    lora_request: "LoRARequest | None"
    keep: Keep


class BackgroundFills:
    """Runs ingestions in rounds, one round at a time over all of them."""

    def __init__(self, engine: "ChunkEngine") -> None:
        self._engine = engine
        self._turn = asyncio.Lock()
        self._pause_until = 0.0

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
        """Waits for the end of the pause, or until nobody else needs the engine."""
        while not self._engine.is_stopping and self._is_busy() and (left := self._pause_until - time.monotonic()) > 0:
            await asyncio.sleep(min(left, 0.02))

    def _is_busy(self) -> bool:
        """Whether the engine has requests. Between rounds none of them is ours."""
        return bool(num_unfinished_requests(self._engine.llm))

    def _round_tokens(self) -> int:
        assert self._engine.manager is not None
        config = self._engine.manager.config
        most = BUSY_ROUND_TOKENS if self._is_busy() else IDLE_ROUND_TOKENS
        return min(most, config.num_pages * config.page_tokens // 4)

    async def _round(self, ingestion: Ingestion, chunks: list[Chunk]) -> list[Ingested]:
        """Results of the first chunks, at least one: as many as the pool can hold at once. None begins at the end."""
        if self._engine.is_stopping:
            return [Ingested(chunk, error="the server is stopping") for chunk in chunks]
        assert self._engine.fills is not None
        leases: dict[int, tuple[Lease, list[FillTask]]] = {}
        results: dict[int, Ingested] = {}
        name = f"ingest-{uuid4().hex}"
        try:
            for i, chunk in enumerate(chunks):
                try:
                    leases[i] = self._start(ingestion, chunk, f"{name}-{i}")
                except FullAttentionError as error:
                    if error.kind == "capacity" and leases:
                        break  # what this round holds can be evicted in the next
                    results[i] = Ingested(chunk, error=str(error))
            for i, (lease, tasks) in leases.items():
                results[i] = await self._finish(ingestion, chunks[i], lease, tasks)
            return [results[i] for i in range(len(results))]
        finally:
            for lease, _ in leases.values():
                self._engine.release(lease)

    def _start(self, ingestion: Ingestion, chunk: Chunk, name: str) -> tuple[Lease, list[FillTask]]:
        engine, prompt = self._engine, replace(ingestion.frame, chunks=(chunk,))
        assert engine.fills is not None
        num_tokens, limit = len(prompt.chunk_prefix) + chunk.num_tokens, engine.llm.model_config.max_model_len
        if num_tokens >= limit:
            raise FullAttentionError("too long", f"{num_tokens} tokens don't fit the model's context length of {limit}")
        lease = engine.acquire(prompt, engine.layout(prompt, PositionStrategy.SHARED), ingestion.scope)
        salt = engine.plain_salt(ingestion.scope, ingestion.cache_salt)
        tasks = engine.fills.start(lease, name, salt, {}, lora_request=ingestion.lora_request, **self._priority())
        return lease, tasks

    def _priority(self) -> dict[str, int]:
        has_priorities = self._engine.llm.vllm_config.scheduler_config.policy == "priority"
        return {"priority": _LOWEST_PRIORITY} if has_priorities else {}

    async def _finish(self, ingestion: Ingestion, chunk: Chunk, lease: Lease, tasks: list[FillTask]) -> Ingested:
        assert self._engine.fills is not None
        (segment,) = lease.chunks
        try:
            results = await self._engine.fills.wait(lease, tasks)
            if segment.entry.detached:
                raise ChunkCacheError("it was removed while it was computed")
            ingestion.keep(chunk, segment.entry)
        except (FullAttentionError, ChunkCacheError) as error:
            return Ingested(chunk, str(segment.entry.key), error=str(error))
        sources = [r.source for job, r in zip(lease.fills, results, strict=True) if segment.entry in job.entries]
        status = sources[0].status if sources and sources[0] is not None else segment.status
        return Ingested(chunk, str(segment.entry.key), status)


class _Queue:
    """Chunks yet to be computed."""

    def __init__(self, chunks: Iterable[Chunk]) -> None:
        self._chunks = deque(chunks)

    def take(self, num_tokens: int) -> list[Chunk]:
        """The next chunk, and those after it that don't exceed ``num_tokens`` together."""
        taken: list[Chunk] = []
        while self._chunks and (not taken or self._chunks[0].num_tokens <= num_tokens):
            taken.append(self._chunks.popleft())
            num_tokens -= taken[-1].num_tokens
        return taken

    def put_back(self, chunks: Sequence[Chunk]) -> None:
        """The next chunks again."""
        self._chunks.extendleft(reversed(chunks))
