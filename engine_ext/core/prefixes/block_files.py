# SPDX-License-Identifier: Apache-2.0
"""A worker's blocks as files in its tiers: read and checked before they are loaded, written behind the requests."""

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Final, NamedTuple, assert_never

from torch import Tensor

from cache.tiers.chain import Events, TierChain
from cache.tiers.tier import Address, Buffer
from engine_ext.core.moves import Moves
from engine_ext.core.prefixes.mover import BlockMover
from engine_ext.wire.chunk_file import LONGEST_HEADER, BlankFile, ChunkFileLabel, unpack_file
from engine_ext.wire.prefix import file_key, is_block_of
from engine_ext.wire.worker_messages import (
    Answer,
    BlockMessage,
    CountBlocks,
    DropBlocks,
    ReleaseBlocks,
    StageBlocks,
    StopBlocks,
    block_message,
)
from kernels.threads import use_one_thread

logger = logging.getLogger(__name__)

Tensors = Mapping[str, Tensor]

MOST_STAGED_BYTES: Final = 1 << 30
MOST_WAITING_BYTES: Final = 256 << 20
PAUSE: Final = 9
"""Length of the pause after each file while requests run, in lengths of the writing."""
_BUSY_S: Final = 0.2


class Engine(NamedTuple):
    """The engine of the blocks, and this worker's place in it."""

    fingerprint: str
    rank: int
    ranks: int


class BlockFiles:
    """Files of :attr:`BlockMover.num_blocks` blocks each.

    ``load`` and ``store`` are called between the engine's steps, everything else by the threads of
    :func:`engine_ext.core.file_server.listen`.
    """

    def __init__(self, mover: BlockMover, chain: TierChain, engine: Engine) -> None:
        self._mover = mover
        self._chain = chain
        self._engine = engine
        self._lock = threading.Condition()
        self._staged: dict[str, dict[str, Tensors]] = {}
        self._waiting: deque[tuple[Address, BlankFile, Moves]] = deque()
        self._writing: Address | None = None
        self._is_stopped = False
        self._last_step = 0.0
        self._events: list[tuple[str, str]] = []
        threading.Thread(target=self._write_all, name="blocks", daemon=True).start()

    # Between steps

    def note_step(self) -> None:
        """Notes that requests run."""
        self._last_step = time.monotonic()

    def load(self, stage: str, keys: Sequence[str], block_ids: Sequence[int]) -> int:
        """Writes staged files to blocks, of which the first file's first may be left out; returns the bytes."""
        with self._lock:
            files = [self._staged[stage][key] for key in keys]
        per_file = self._mover.num_blocks
        first = len(block_ids) - (len(files) - 1) * per_file
        start = 0
        for number, tensors in enumerate(files):
            end = first + number * per_file
            self._mover.write(block_ids[start:end], tensors)
            start = end
        return len(files) * self._mover.num_bytes

    def store(self, namespace: str, keys: Sequence[str], block_ids: Sequence[int]) -> int:
        """Copies blocks, and queues them for the tiers; returns the bytes."""
        per_file = self._mover.num_blocks
        copied = 0
        for number, key in enumerate(keys):
            if self._is_stopped or len(self._waiting) * self._mover.num_bytes >= MOST_WAITING_BYTES:
                self._note("skipped")
                continue
            address = self._address(namespace, key)
            file = BlankFile(self._label(address), self._mover.forms, self._mover.allocate)
            moves = self._mover.read(block_ids[number * per_file : (number + 1) * per_file], file.tensors)
            with self._lock:
                self._waiting.append((address, file, moves))
                self._lock.notify_all()
            copied += self._mover.num_bytes
        return copied

    # In threads

    def answer(self, connection: Connection) -> None:
        """Carries out one message."""
        connection.send_bytes(self.carried_out(block_message(connection.recv_bytes())).to_bytes())

    def carried_out(self, message: BlockMessage) -> Answer:
        """The answer to a message."""
        answer = Answer()
        try:
            match message:
                case StageBlocks():
                    answer.count = self._stage(message)
                case ReleaseBlocks():
                    self._release(message)
                case DropBlocks():
                    self._drop(message)
                case StopBlocks():
                    self._stop()
                case CountBlocks():
                    self._count(answer)
                case _:
                    assert_never(message)
        except Exception as error:
            logger.exception("a command for blocks in tiers failed")
            answer.error = repr(error)
        return answer

    def _count(self, answer: Answer) -> None:
        """Counts for the app, which therefore gets the tiers' events as well."""
        answer.count = len(self._waiting) + (self._writing is not None) + self._is_busy
        with self._lock:
            answer.events, self._events = self._events, []
        answer.held = {tier.name: tier.num_bytes for tier in self._chain.tiers}

    def _stage(self, message: StageBlocks) -> int:
        deadline, found = time.monotonic() + self._chain.timeout_s, dict[str, Tensors]()
        with self._lock:
            room = MOST_STAGED_BYTES // self._mover.num_bytes - sum(map(len, self._staged.values()))
            self._staged[message.name] = found
        for key in message.keys[: max(0, room)]:
            if (
                self._is_stopped
                or time.monotonic() > deadline
                or (tensors := self._read(message.namespace, key)) is None
            ):
                break
            found[key] = tensors
        return len(found)

    def _read(self, namespace: str, key: str) -> Tensors | None:
        address = self._address(namespace, key)

        def checked(data: Buffer) -> Tensors:
            tensors = unpack_file(data, self._label(address))
            self._mover.check(tensors)
            return tensors

        names, events = [tier.name for tier in self._chain.tiers], Events()
        found = self._chain.get(address, self._mover.num_bytes + LONGEST_HEADER, names, checked, events)
        self._note_all(events)
        return found[1] if found is not None else None

    def _release(self, message: ReleaseBlocks) -> None:
        with self._lock:
            self._staged.pop(message.name, None)

    def _drop(self, message: DropBlocks) -> None:
        def is_meant(address: Address) -> bool:
            is_own = (address.part, address.parts) == (self._engine.rank, self._engine.ranks)
            return is_own and is_block_of(address.key, self._engine.fingerprint, message.namespace)

        with self._lock:
            self._waiting = deque(each for each in self._waiting if not is_meant(each[0]))
            self._lock.wait_for(lambda: self._writing is None or not is_meant(self._writing))
        events = Events()
        self._chain.delete_all(is_meant, events)
        self._note_all(events)

    def _stop(self) -> None:
        with self._lock:
            self._is_stopped = True
            self._waiting.clear()

    def _write_all(self) -> None:
        use_one_thread()
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._waiting)
                address, file, moves = self._waiting.popleft()
                self._writing = address
            started, events = time.monotonic(), Events()
            moves.wait()
            self._chain.put(address, file.seal(), events)
            with self._lock:
                self._writing = None
                self._lock.notify_all()
            self._note_all(events)
            if self._is_busy:
                time.sleep(PAUSE * (time.monotonic() - started))

    @property
    def _is_busy(self) -> bool:
        """Whether requests run, whose blocks may still come."""
        return time.monotonic() - self._last_step < _BUSY_S

    def _address(self, namespace: str, key: str) -> Address:
        engine = self._engine
        return Address(file_key(engine.fingerprint, namespace, key), engine.rank, engine.ranks)

    def _label(self, address: Address) -> ChunkFileLabel:
        return ChunkFileLabel(self._engine.fingerprint, address.key, "", "", address.part, address.parts)

    def _note(self, word: str) -> None:
        with self._lock:
            self._events += [(tier.name, word) for tier in self._chain.tiers]

    def _note_all(self, events: Events) -> None:
        with self._lock:
            self._events += events.happened
