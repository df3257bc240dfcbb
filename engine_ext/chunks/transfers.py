# SPDX-License-Identifier: Apache-2.0
"""Segments of the pool as files: the app's side of :mod:`engine_ext.core.file_server`."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import asynccontextmanager
from multiprocessing.connection import Client

from vllm.v1.engine.async_llm import AsyncLLM

from cache.config import ChunkCacheConfig
from cache.segments.hashing import ChunkHash
from cache.segments.index import ChunkKVCache
from cache.tiers.kept import KeptMemory
from cache.tiers.signed import TierKey
from cache.tiers.tier import Address
from engine_ext.wire.chunk_file import ChunkFileLabel, pack_file, unpack_file
from engine_ext.wire.id_record import record_of, record_tensors
from engine_ext.wire.parts import Division, division
from engine_ext.wire.prefix import blocks_address
from engine_ext.wire.worker_messages import (
    Answer,
    BlockMessage,
    Drop,
    Fetch,
    FindRecord,
    KeepRecord,
    ListRecords,
    Load,
    Read,
    ReadStored,
    SegmentMessage,
    Store,
    receive_file,
)

logger = logging.getLogger(__name__)

_AT_ONCE, _GIVEN_AT_ONCE = 16, 8
"""Segments that move at once for this replica, and for others, beside one that is stored."""


class TransferError(Exception):
    """A worker failed to read or write; the message says why."""


class PoolTransfers:
    """Reads and writes segments in all workers' pools, several at a time."""

    def __init__(
        self, addresses: Sequence[str], parts: Division, config: ChunkCacheConfig, *, keeps_prefixes: bool = False
    ) -> None:
        """``keeps_prefixes``: whether the workers keep prefixes of prompts in tiers, too."""
        self._fingerprint, self._peer_fingerprint = config.fingerprint, config.peer_fingerprint
        self.keeps_prefixes = keeps_prefixes
        self.parts = parts
        # Each exchange takes a thread while it waits.
        threads = ThreadPoolExecutor((_AT_ONCE + _GIVEN_AT_ONCE + 2) * len(addresses), thread_name_prefix="transfers")
        memory = KeptMemory()
        # Others have lanes of their own: this replica's requests don't wait for what they read from a slow tier.
        own, giving = (
            [[_Worker(address, threads, memory) for address in addresses] for _ in range(number)]
            for number in (_AT_ONCE, _GIVEN_AT_ONCE)
        )
        self._own, self._giving = _queue_of(own), _queue_of(giving)
        self._storing = [_Worker(address, threads, memory) for address in addresses]
        self._of_blocks = [_Worker(blocks_address(address), threads, memory) for address in addresses if keeps_prefixes]
        self._workers = [worker for lane in (*own, *giving, self._storing, self._of_blocks) for worker in lane]
        self._threads = threads

    async def read(self, entry: ChunkKVCache, part: int) -> memoryview:
        """A part's file, for others, of a segment that the caller leases; raises :class:`TransferError`."""
        async with _lane_of(self._giving) as workers:
            worker = workers[self.parts.owners[part]]
            return await worker.read(Read(self._label(entry, part), entry.pages, entry.tag))

    async def read_stored(self, entry: ChunkKVCache, part: int) -> tuple[Answer, memoryview]:
        """A part's file, for others, of a segment in a worker's tiers, and its answer; raises :class:`TransferError`.

        The answer names the tier that had the file. If none had, the file is empty.
        """
        async with _lane_of(self._giving) as workers:
            return await workers[self.parts.owners[part]].exchanged(ReadStored(self._label(entry, part)))

    async def fetch(self, entry: ChunkKVCache, url: str, secret: str, limit_s: float) -> list[Answer]:
        """Fills a segment from another replica's files at ``url``, which the peers' ``secret`` signs.

        It may be loaded only if every worker fetched its part. It returns, even if cancelled, only when all workers
        have stopped writing: the pages may then be reused. Raises :class:`TransferError` for files of something else.
        """
        async with _lane_of(self._own) as workers:
            return await self._all(
                workers,
                lambda part: Fetch(
                    self._label(entry, part), entry.pages, entry.tag, url, self._peer_fingerprint, secret, limit_s
                ),
            )

    async def load(self, entry: ChunkKVCache, tiers: Sequence[str], limit_s: float = 0.0) -> list[Answer]:
        """Imports a segment that is being filled from ``tiers``; returns like :meth:`fetch`.

        It may be loaded only if each worker's answer names a tier. A tier that takes longer than ``limit_s``, if that
        is not 0, is passed over. Raises :class:`TransferError`.
        """
        async with _lane_of(self._own) as workers:
            return await self._all(
                workers,
                lambda part: Load(
                    self._label(entry, part), entry.pages, entry.tag, self.parts.others, tuple(tiers), limit_s
                ),
            )

    async def store(self, entry: ChunkKVCache) -> list[Answer]:
        """Exports a segment that the caller leases to every tier; other calls don't wait for it.

        Raises :class:`TransferError`.
        """
        owners = set(self.parts.owners)
        answers = list[Answer]()
        # Where another worker has the same part, tiers that they share have its file by then, and take no second one.
        for numbers in (sorted(owners), [number for number in range(len(self._storing)) if number not in owners]):
            answers += await self._all(
                self._storing, lambda part: Store(self._label(entry, part), entry.pages, entry.tag), numbers
            )
        return answers

    async def drop(self, key: ChunkHash) -> None:
        """Drops a segment, of whatever parts, from every tier; raises :class:`TransferError`."""
        sizes = (self.parts.num_parts, *self.parts.others)
        addresses = [Address(str(key), part, size) for size in sizes for part in range(size)]
        async with _lane_of(self._own) as workers:
            await self._all(workers, lambda _: Drop(addresses))

    async def keep_record(self, key: ChunkHash, data: bytes) -> None:
        """Stores the record of a chunk id in every tier, instead of an earlier one; raises :class:`TransferError`."""
        label = self._record_label(str(key))
        async with _lane_of(self._own) as workers:
            await workers[0].ask(KeepRecord(label, bytes(pack_file(label, record_tensors(data)))))

    async def find_record(self, key: ChunkHash) -> tuple[str | None, bytes]:
        """A record, and the tier that has it; raises :class:`TransferError`."""
        label = self._record_label(str(key))
        async with _lane_of(self._own) as workers:
            answer = await workers[0].ask(FindRecord(label))
        if answer.tier is None:
            return None, b""
        return answer.tier, record_of(unpack_file(answer.record, label))

    async def list_records(self) -> list[ChunkHash]:
        """Keys of the engine's records in all tiers; raises :class:`TransferError`."""
        async with _lane_of(self._own) as workers:
            answer = await workers[0].ask(ListRecords(self._fingerprint))
        return [ChunkHash(bytes.fromhex(key)) for key in answer.keys]

    async def ask_for_blocks(self, message: BlockMessage) -> list[Answer]:
        """The answers of all workers, none if they keep no prefixes; raises :class:`TransferError`."""
        return await asyncio.gather(*(worker.ask(message) for worker in self._of_blocks))

    def close(self) -> None:
        """Ends the connections."""
        for worker in self._workers:
            worker.close()
        self._threads.shutdown(wait=False)

    async def _all(
        self,
        workers: "Sequence[_Worker]",
        message_to: Callable[[int], SegmentMessage],
        numbers: Iterable[int] | None = None,
    ) -> list[Answer]:
        """The answers of all workers, or of these ``numbers``; ``message_to`` gives the message by part."""
        chosen = range(len(workers)) if numbers is None else numbers
        asked = (workers[number].ask(message_to(self.parts.of_workers[number])) for number in chosen)
        moving = asyncio.gather(*asked, return_exceptions=True)
        is_cancelled = False
        while not moving.done():
            try:
                await asyncio.wait([moving])
            except asyncio.CancelledError:
                is_cancelled = True
        if is_cancelled:
            raise asyncio.CancelledError
        answers = []
        for answered in moving.result():
            if isinstance(answered, BaseException):
                raise answered
            answers.append(answered)
        return answers

    def _record_label(self, key: str) -> ChunkFileLabel:
        return ChunkFileLabel(self._fingerprint, key, "", "", 0, 1)

    def _label(self, entry: ChunkKVCache, part: int) -> ChunkFileLabel:
        prefix, tokens = entry.identity.prefix.hex(), entry.identity.tokens.hex()
        return ChunkFileLabel(self._fingerprint, str(entry.key), prefix, tokens, part, self.parts.num_parts)


Lane = list["_Worker"]
"""A connection to each worker."""


def _queue_of(lanes: Sequence[Lane]) -> asyncio.Queue[Lane]:
    queue = asyncio.Queue[Lane]()
    for lane in lanes:
        queue.put_nowait(lane)
    return queue


@asynccontextmanager
async def _lane_of(lanes: asyncio.Queue[Lane]) -> AsyncIterator[Lane]:
    """One of the lanes, once one is free."""
    lane = await lanes.get()
    try:
        yield lane
    finally:
        lanes.put_nowait(lane)


class _Worker:
    """A connection to one worker, for one transfer at a time."""

    def __init__(self, address: str, threads: Executor, memory: KeptMemory) -> None:
        self._threads = threads
        self._memory = memory
        self._connection = Client(address, "AF_UNIX")
        self._turn = asyncio.Lock()

    async def ask(self, message: SegmentMessage | BlockMessage) -> Answer:
        """The answer; raises :class:`TransferError`."""
        answer, _ = await self.exchanged(message)
        return answer

    async def read(self, message: Read) -> memoryview:
        """The file that follows the answer; raises :class:`TransferError`."""
        _, file = await self.exchanged(message)
        return file

    async def exchanged(self, message: SegmentMessage | BlockMessage) -> tuple[Answer, memoryview]:
        """The answer, and the file that follows it, if any; raises :class:`TransferError`.

        The exchange goes on when the caller is cancelled: otherwise the next one would read this answer.
        """
        return await asyncio.shield(asyncio.create_task(self._in_turn(message)))

    async def _in_turn(self, message: SegmentMessage | BlockMessage) -> tuple[Answer, memoryview]:
        async with self._turn:
            return await asyncio.get_running_loop().run_in_executor(self._threads, self._exchange, message)

    def _exchange(self, message: SegmentMessage | BlockMessage) -> tuple[Answer, memoryview]:
        try:
            self._connection.send_bytes(message.to_bytes())
            answer = Answer.from_bytes(self._connection.recv_bytes())
            if answer.error:
                raise TransferError(answer.error)
            file = self._memory.take(answer.num_bytes) if isinstance(message, Read | ReadStored) else memoryview(b"")
            receive_file(self._connection, file)
            return answer, file
        except (EOFError, OSError) as error:
            raise TransferError(f"a worker has ended: {error!r}") from error

    def close(self) -> None:
        self._connection.close()


@asynccontextmanager
async def opened_transfers(
    llm: AsyncLLM,
    folder: str,
    config: ChunkCacheConfig,
    tier_urls: Sequence[str],
    tier_key: TierKey | None,
    *,
    keeps_prefixes: bool,
) -> AsyncIterator[PoolTransfers | None]:
    """Transfers with the workers of ``llm``; ``None`` if some of them run on another machine.

    ``folder`` gets the workers' sockets.
    """
    key = None if tier_key is None else tier_key.key
    arguments = (folder, config.fingerprint, list(tier_urls), key, keeps_prefixes)
    served: list[tuple[str, list[int]] | None] = await llm.collective_rpc("chunk_cache_serve_transfers", args=arguments)
    found = [worker for worker in served if worker is not None]
    if len(found) < len(served):
        logger.warning("chunks are neither stored nor shared: some workers run on another machine")
        yield None
        return
    parallel = llm.vllm_config.parallel_config
    parts = division(
        parallel.tensor_parallel_size,
        parallel.pipeline_parallel_size,
        1 if llm.model_config.use_mla else llm.model_config.get_total_num_kv_heads(),
        {heads for _, of_layers in found for heads in of_layers},
    )
    transfers = PoolTransfers([address for address, _ in found], parts, config, keeps_prefixes=keeps_prefixes)
    try:
        yield transfers
    finally:
        transfers.close()
