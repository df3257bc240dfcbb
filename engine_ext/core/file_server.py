# SPDX-License-Identifier: Apache-2.0
"""A worker's threads that move KV between pool, app and tiers during steps.

The app guarantees that pages to read are leased, and that pages to write belong to an entry that can't be loaded yet.
"""

import logging
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection, Listener
from typing import Any, Final

import torch

from cache.positions.layout import packed_length
from cache.tiers.chain import Events, TierChain
from cache.tiers.config import make_tier
from cache.tiers.kept import KeptMemory
from cache.tiers.tier import Address, Buffer
from engine_ext.core.pages import WrongPagesError
from engine_ext.core.worker import WorkerHalf
from engine_ext.wire.chunk_file import LONGEST_HEADER, BlankFile, ChunkFileError, ChunkFileLabel, unpack_file
from engine_ext.wire.file_transfer import Answer, Transfer, send_file
from engine_ext.wire.id_record import LARGEST_RECORD, is_record_of
from kernels.threads import use_one_thread
from replicas.peer_file import PeerFileError, fetch_file
from replicas.signing import PeerKey

logger = logging.getLogger(__name__)

_NICE: Final = 5
"""Niceness of threads that import files: a third of the engine's share of a core that both want."""


@contextmanager
def on_all_cores() -> Iterator[None]:
    """Lets threads that start within the context run on every core: vLLM binds workers, and threads inherit that."""
    bound = os.sched_getaffinity(0)
    with suppress(OSError):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    try:
        yield
    finally:
        os.sched_setaffinity(0, bound)


def listen(address: str, answer: Callable[[Connection], None]) -> None:
    """Serves clients at a Unix socket, each in a thread, until the process ends.

    ``answer`` receives one message and sends its answer.
    """
    listener = Listener(address, "AF_UNIX")

    def serve(connection: Connection) -> None:
        use_one_thread()
        with connection:
            while True:
                try:
                    answer(connection)
                except (EOFError, OSError):
                    return

    def accept() -> None:
        while True:
            threading.Thread(target=serve, args=(listener.accept(),), name="transfers", daemon=True).start()

    threading.Thread(target=accept, name="transfers", daemon=True).start()


def make_chain(half: WorkerHalf, tier_urls: Sequence[str], tier_timeout_s: float) -> TierChain:
    """A worker's tiers; raises :class:`cache.tiers.tier.TierConfigError`."""
    return TierChain([make_tier(url, _allocator(half)) for url in tier_urls], tier_timeout_s)


class TransferServer:
    """Moves segments between the pool, the app and tiers."""

    def __init__(self, half: WorkerHalf, chain: TierChain) -> None:
        self._half = half
        self._chain = chain
        self._memory = KeptMemory(_allocator(half))
        # More threads than cores would wait for each other; the steps of running answers go first.
        self._imports = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="imports", initializer=_give_way)

    def answer(self, connection: Connection) -> None:
        """Carries out one transfer."""
        transfer = Transfer.from_bytes(connection.recv_bytes())
        file = connection.recv_bytes() if transfer.takes_file else b""
        answer, found = self._carried_out(transfer, file)
        answer.held = {tier.name: tier.num_bytes for tier in self._chain.tiers}
        connection.send_bytes(answer.to_bytes())
        if transfer.sends_file and not answer.error:
            send_file(connection, found)

    def _carried_out(self, transfer: Transfer, file: bytes) -> tuple[Answer, Buffer]:
        answer = Answer()
        try:
            return answer, self._carry_out(transfer, file, answer)
        except (WrongPagesError, ChunkFileError) as error:
            answer.error = str(error)
        except Exception as error:
            logger.exception("a transfer failed")
            answer.error = repr(error)
        return answer, b""

    def _carry_out(self, transfer: Transfer, file: Buffer, answer: Answer) -> Buffer:
        """Returns the file that follows the answer, if any."""
        label, num_tokens = transfer.label, packed_length(bytes.fromhex(transfer.label.tokens))
        address, events = Address(label.key, label.rank, label.ranks), Events(answer.events)
        if transfer.verb == "drop":
            self._chain.delete(address, events)
        elif transfer.verb == "keep":
            unpack_file(file, label)
            self._chain.delete(address, events)
            self._chain.put(address, file, events)
        elif transfer.verb == "find":
            names = [tier.name for tier in self._chain.tiers]
            record = self._chain.get(address, LARGEST_RECORD, names, partial(_checked, label=label), events)
            answer.tier, file = record or (None, b"")
            answer.num_bytes = len(file)
        elif transfer.verb == "list":
            found = self._chain.addresses(lambda each: is_record_of(each.key, label.fingerprint), events)
            answer.keys = sorted({each.key for each in found})
        elif transfer.verb == "fetch":
            self._fetch(transfer, num_tokens, answer)
        elif transfer.verb == "load":
            largest = num_tokens * self._half.token_bytes + LONGEST_HEADER
            loaded = self._chain.get(
                address,
                largest,
                transfer.tiers,
                lambda data: (len(data), self._unpack(data, label)),
                events,
                transfer.limit_s or math.inf,
            )
            if loaded is not None:
                answer.tier, (answer.num_bytes, tensors) = loaded
                self._write(transfer, num_tokens, tensors)
        else:
            blank = BlankFile(label, self._half.forms(num_tokens), self._memory.take)
            self._half.read(transfer.pages, transfer.tag, blank.tensors)
            file = blank.seal()
            answer.num_bytes = len(file)
            if transfer.verb == "store":
                self._chain.put(address, file, events)
        return file

    def _fetch(self, transfer: Transfer, num_tokens: int, answer: Answer) -> None:
        largest = num_tokens * self._half.token_bytes + LONGEST_HEADER
        url = f"{transfer.url}?rank={transfer.label.rank}"
        try:
            key, engine = PeerKey(transfer.secret), transfer.label.fingerprint
            file = fetch_file(url, key, engine, largest, transfer.limit_s, self._memory.take)
        except PeerFileError as error:
            logger.warning("a replica's chunk: %s", error)
            answer.fetched = "failed"
            return
        answer.fetched = "absent" if file is None else "fetched"
        if file is not None:
            self._write(transfer, num_tokens, self._unpack(file, transfer.label))

    def _unpack(self, file: Buffer, label: ChunkFileLabel) -> dict[str, torch.Tensor]:
        return self._imports.submit(unpack_file, file, label).result()

    def _write(self, transfer: Transfer, num_tokens: int, tensors: Mapping[str, torch.Tensor]) -> None:
        self._imports.submit(self._half.write, transfer.pages, transfer.tag, num_tokens, tensors).result()


def _give_way() -> None:
    use_one_thread()
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


def _checked(data: Buffer, label: ChunkFileLabel) -> bytes:
    unpack_file(data, label)
    return bytes(data)


def _allocator(half: WorkerHalf) -> Callable[[int], memoryview] | None:
    """Gives memory that the device copies best; ``None``: any is as good."""
    return None if half.device.type == "cpu" else _pinned


def _pinned(num_bytes: int) -> memoryview:
    """Host memory from which a device copies without staging."""
    pinned: Any = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True).numpy()
    return memoryview(pinned)
