# SPDX-License-Identifier: Apache-2.0
"""A worker's threads that move KV between pool, app and tiers during steps.

The app guarantees that pages to read are leased, and that pages to write belong to an entry that can't be loaded yet.
"""

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection, Listener
from typing import Any, Final, assert_never

import torch

from cache.positions.layout import packed_length
from cache.tiers.chain import Events, TierChain
from cache.tiers.config import make_tier
from cache.tiers.kept import KeptMemory
from cache.tiers.signed import TierKey
from cache.tiers.tier import Address, Buffer
from engine_ext.core.pages import WrongPagesError
from engine_ext.core.worker import WorkerHalf
from engine_ext.wire.chunk_file import LONGEST_HEADER, BlankFile, ChunkFileError, ChunkFileLabel, unpack_file
from engine_ext.wire.id_record import LARGEST_RECORD, is_record_of, record_of
from engine_ext.wire.parts import joined, sources
from engine_ext.wire.worker_messages import (
    Answer,
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
    segment_message,
    send_file,
)
from kernels.threads import use_one_thread
from replicas.peer_file import PeerFileError, fetch_file
from replicas.signing import PeerKey

logger = logging.getLogger(__name__)

_ABSENT_S: Final = 60.0
"""How long a number of parts that no segment was ever found in isn't looked for again: each look is a round trip."""
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


def make_chain(half: WorkerHalf, tier_urls: Sequence[str], key: TierKey | None) -> TierChain:
    """A worker's tiers; raises :class:`cache.tiers.tier.TierConfigError`."""
    return TierChain([make_tier(url, allocator(half), key) for url in tier_urls])


class TransferServer:
    """Moves segments between the pool, the app and tiers."""

    def __init__(self, half: WorkerHalf, chain: TierChain) -> None:
        self._half = half
        self._chain = chain
        self._memory = KeptMemory(allocator(half))
        # More threads than cores would wait for each other; the steps of running answers go first.
        self._imports = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="imports", initializer=_give_way)
        # Numbers of parts that tiers had segments in, and when to look again for those that they had none in.
        self._met: set[int] = set()
        self._absent_until: dict[int, float] = {}

    def answer(self, connection: Connection) -> None:
        """Carries out one message."""
        message = segment_message(connection.recv_bytes())
        answer, file = self._carried_out(message)
        answer.held = {tier.name: tier.num_bytes for tier in self._chain.tiers}
        connection.send_bytes(answer.to_bytes())
        send_file(connection, file)

    def _carried_out(self, message: SegmentMessage) -> tuple[Answer, Buffer]:
        """The answer, and the file that follows it; empty if none does."""
        answer = Answer()
        try:
            return answer, self._carry_out(message, answer)
        except (WrongPagesError, ChunkFileError) as error:
            answer.error = str(error)
        except Exception as error:
            logger.exception("a transfer failed")
            answer.error = repr(error)
        return answer, b""

    def _carry_out(self, message: SegmentMessage, answer: Answer) -> Buffer:
        match message:
            case Read():
                return self._read(message, answer)
            case ReadStored():
                return self._read_stored(message, answer)
            case Store():
                self._chain.put(_address(message.label), self._read(message, answer), Events(answer.events))
            case Load():
                self._load(message, answer)
            case Fetch():
                self._fetch(message, answer)
            case Drop():
                self._chain.delete(message.addresses, Events(answer.events))
            case KeepRecord():
                self._keep_record(message, answer)
            case FindRecord():
                self._find_record(message, answer)
            case ListRecords():
                records = self._chain.addresses(
                    lambda each: is_record_of(each.key, message.fingerprint), Events(answer.events)
                )
                answer.keys = sorted({each.key for each in records})
            case _:
                assert_never(message)
        return b""

    def _read(self, message: Read | Store, answer: Answer) -> Buffer:
        blank = BlankFile(message.label, self._half.forms(_num_tokens(message.label)), self._memory.take)
        self._half.read(message.pages, message.tag, blank.tensors)
        file = blank.seal()
        answer.num_bytes = len(file)
        return file

    def _read_stored(self, message: ReadStored, answer: Answer) -> Buffer:
        label = message.label

        def checked(data: Buffer) -> Buffer:
            self._unpack(data, label)
            return data

        return self._from_tiers(label, self._largest(label), checked, answer)

    def _load(self, message: Load, answer: Answer) -> None:
        own = message.label.parts
        for parts in (own, *message.others):
            if time.monotonic() < self._absent_until.get(parts, 0.0):
                continue
            if (tensors := self._loaded(message, parts, answer)) is not None:
                self._met.add(parts)
                self._write(message, tensors)
                return
            if parts != own and parts not in self._met:
                self._absent_until[parts] = time.monotonic() + _ABSENT_S

    def _loaded(self, message: Load, parts: int, answer: Answer) -> dict[str, torch.Tensor] | None:
        """The tensors of the message's part, from tiers that have the segment in so many parts."""
        files, tiers, num_bytes = list[dict[str, torch.Tensor]](), list[str](), 0
        wanted = sources(message.label.part, message.label.parts, parts)
        for source in wanted:
            label = replace(message.label, part=source.part, parts=parts)
            loaded = self._chain.get(
                _address(label),
                self._largest(label, source.shares),
                message.tiers,
                lambda data, label=label: (len(data), self._unpack(data, label)),  # type: ignore[misc]
                Events(answer.events),
                message.limit_s or math.inf,
            )
            if loaded is None:
                return None
            tier, (length, file) = loaded
            files.append(file)
            tiers.append(tier)
            num_bytes += length
        # The slowest of them.
        answer.tier, answer.num_bytes = max(tiers, key=message.tiers.index), num_bytes
        return joined(files, wanted)

    def _fetch(self, message: Fetch, answer: Answer) -> None:
        url = f"{message.url}?part={message.label.part}"
        try:
            key, most = PeerKey(message.secret), self._largest(message.label)
            file = fetch_file(url, key, message.engine, most, message.limit_s, self._memory.take)
        except PeerFileError as error:
            logger.warning("a replica's chunk: %s", error)
            answer.fetched = "failed"
            return
        answer.fetched = "absent" if file is None else "fetched"
        if file is not None:
            self._write(message, self._unpack(file, message.label))

    def _keep_record(self, message: KeepRecord, answer: Answer) -> None:
        address, events = _address(message.label), Events(answer.events)
        unpack_file(message.file, message.label)
        self._chain.delete([address], events)
        self._chain.put(address, message.file, events)

    def _find_record(self, message: FindRecord, answer: Answer) -> None:
        label = message.label
        answer.record = bytes(self._from_tiers(label, LARGEST_RECORD, partial(_checked_record, label=label), answer))

    def _from_tiers(
        self, label: ChunkFileLabel, most_bytes: int, check: Callable[[Buffer], Buffer], answer: Answer
    ) -> Buffer:
        """A file from the first tier whose file passes ``check``, which the answer names; empty if none has it."""
        names = [tier.name for tier in self._chain.tiers]
        found = self._chain.get(_address(label), most_bytes, names, check, Events(answer.events))
        answer.tier, file = found or (None, b"")
        answer.num_bytes = len(file)
        return file

    def _largest(self, label: ChunkFileLabel, shares: int = 1) -> int:
        """Bytes that a segment's file has at most, of which this worker's part are so many shares."""
        return _num_tokens(label) * self._half.token_bytes * shares + LONGEST_HEADER

    def _unpack(self, file: Buffer, label: ChunkFileLabel) -> dict[str, torch.Tensor]:
        return self._imports.submit(unpack_file, file, label).result()

    def _write(self, message: Load | Fetch, tensors: Mapping[str, torch.Tensor]) -> None:
        num_tokens = _num_tokens(message.label)
        self._imports.submit(self._half.write, message.pages, message.tag, num_tokens, tensors).result()


def _address(label: ChunkFileLabel) -> Address:
    return Address(label.key, label.part, label.parts)


def _num_tokens(label: ChunkFileLabel) -> int:
    return packed_length(bytes.fromhex(label.tokens))


def _give_way() -> None:
    use_one_thread()
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


def _checked_record(data: Buffer, label: ChunkFileLabel) -> bytes:
    record_of(unpack_file(data, label))
    return bytes(data)


def allocator(half: WorkerHalf) -> Callable[[int], memoryview] | None:
    """Gives memory that the device copies best, while the worker starts; ``None``: any is as good."""
    return None if half.device.type == "cpu" else partial(_pinned, half)


def _pinned(half: WorkerHalf, num_bytes: int) -> memoryview:
    """Host memory from which the pool's device copies without staging."""
    half.use_device()
    pinned: Any = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True).numpy()
    return memoryview(pinned)
