# SPDX-License-Identifier: Apache-2.0
"""Segments of the pool as files, for whoever sends them: the app's side of :mod:`engine_ext.transfer_server`."""

import asyncio
import logging
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from multiprocessing.connection import Client

from vllm.v1.engine.async_llm import AsyncLLM

from cache.index import ChunkKVCache
from engine_ext.chunk_file import ChunkFileLabel
from engine_ext.transfer_server import Transfer

logger = logging.getLogger(__name__)


class TransferError(Exception):
    """A worker would not read or write; the message says why."""


class PoolTransfers:
    """Reads and writes segments in all workers' pools at once; files are in the order of the workers' ranks."""

    def __init__(self, addresses: Sequence[str], fingerprint: str) -> None:
        self._fingerprint = fingerprint
        self._workers = [_Worker(address) for address in addresses]

    @property
    def num_workers(self) -> int:
        """Files of each segment."""
        return len(self._workers)

    async def read(self, entry: ChunkKVCache, rank: int) -> bytes:
        """One worker's file of a segment that the caller leases; raises :class:`TransferError`."""
        return await self._workers[rank].ask(self._transfer(entry, rank))

    async def write(self, entry: ChunkKVCache, files: Sequence[bytes]) -> None:
        """Writes a segment that is being filled; raises :class:`TransferError`, and then nothing of it may be loaded.

        It returns, even if cancelled, only when no worker writes any more: the pages may be another's from then on.
        """
        writing = asyncio.gather(
            *(
                worker.ask(self._transfer(entry, rank, is_write=True), file)
                for rank, (worker, file) in enumerate(zip(self._workers, files, strict=True))
            ),
            return_exceptions=True,
        )
        is_cancelled = False
        while not writing.done():
            try:
                await asyncio.wait([writing])
            except asyncio.CancelledError:
                is_cancelled = True
        if is_cancelled:
            raise asyncio.CancelledError
        for answer in writing.result():
            if isinstance(answer, BaseException):
                raise answer

    def close(self) -> None:
        """Ends the connections."""
        for worker in self._workers:
            worker.close()

    def _transfer(self, entry: ChunkKVCache, rank: int, *, is_write: bool = False) -> Transfer:
        identity = entry.identity
        prefix, tokens = identity.prefix.hex(), identity.tokens.hex()
        label = ChunkFileLabel(self._fingerprint, str(entry.key), prefix, tokens, rank, self.num_workers)
        return Transfer(label, entry.pages, entry.tag, is_write)


class _Worker:
    """Asks one worker one thing after the other."""

    def __init__(self, address: str) -> None:
        self._connection = Client(address, "AF_UNIX")
        self._turn = asyncio.Lock()

    async def ask(self, transfer: Transfer, file: bytes = b"") -> bytes:
        """The file that was asked for. Goes on if it is cancelled, since the next answer would be this one."""
        return await asyncio.shield(asyncio.create_task(self._ask(transfer, file)))

    async def _ask(self, transfer: Transfer, file: bytes) -> bytes:
        async with self._turn:
            return await asyncio.to_thread(self._exchange, transfer, file)

    def _exchange(self, transfer: Transfer, file: bytes) -> bytes:
        try:
            self._connection.send_bytes(transfer.to_bytes())
            if transfer.is_write:
                self._connection.send_bytes(file)
            if error := self._connection.recv_bytes():
                raise TransferError(error.decode())
            return b"" if transfer.is_write else self._connection.recv_bytes()
        except (EOFError, OSError) as error:
            raise TransferError(f"a worker is gone: {error!r}") from error

    def close(self) -> None:
        self._connection.close()


@asynccontextmanager
async def opened_transfers(llm: AsyncLLM, fingerprint: str) -> AsyncIterator[PoolTransfers | None]:
    """Transfers with the workers of ``llm``; ``None`` if some of them run on another machine."""
    with tempfile.TemporaryDirectory(prefix="tessera-") as folder:
        addresses: list[str | None] = await llm.collective_rpc("chunk_cache_serve_transfers", args=(folder,))
        found = [address for address in addresses if address is not None]
        if len(found) < len(addresses):
            logger.warning("chunks are not shared with other replicas: some workers run on another machine")
            yield None
            return
        transfers = PoolTransfers(found, fingerprint)
        try:
            yield transfers
        finally:
            transfers.close()
