# SPDX-License-Identifier: Apache-2.0
"""Host memory: the fastest tier, which ends with the process."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from cache.segments.holdings import HOST
from cache.tiers.slabs import Slabs
from cache.tiers.tier import TIMEOUT_S, Address, Buffer, Stored, TierError


class MemoryTier:
    """A :class:`cache.tiers.tier.StorageTier` in this process.

    ``allocate`` gives memory, pinned for instance: all of it at once, for :class:`cache.tiers.slabs.Slabs`. Without it,
    files take ordinary memory when they come.
    """

    name = HOST
    timeout_s = TIMEOUT_S

    def __init__(self, max_bytes: int, allocate: Callable[[int], memoryview] | None = None) -> None:
        self.max_bytes = max_bytes
        slabs = None if allocate is None else Slabs(max_bytes, allocate)
        self._take = _ordinary if slabs is None else slabs.take
        self._longest = max_bytes if slabs is None else slabs.longest
        self._files: OrderedDict[Address, tuple[memoryview, float]] = OrderedDict()
        self.num_bytes = 0
        self._lock = threading.RLock()

    def put(self, address: Address, file: Buffer) -> None:
        size = len(file)
        if size > self._longest:
            raise TierError(f"{size} bytes exceed the limit of {self._longest}")
        if address in self._files:
            return
        with self._lock:
            memory = self._room_for(size)
            self.num_bytes += size
        try:
            memory[:] = file
        except BaseException:
            with self._lock:
                self.num_bytes -= size
            raise
        with self._lock:
            self._files[address] = memory, time.time()

    def get(self, address: Address, max_bytes: int) -> Buffer | None:
        with self._lock:
            if (found := self._files.get(address)) is None:
                return None
            self._files[address] = found[0], time.time()
            self._files.move_to_end(address)
        return found[0][:max_bytes]

    def stat(self, address: Address) -> Stored | None:
        found = self._files.get(address)
        return None if found is None else Stored(address, len(found[0]), found[1])

    def delete(self, addresses: Sequence[Address]) -> None:
        with self._lock:
            for address in addresses:
                if (found := self._files.pop(address, None)) is not None:
                    self.num_bytes -= len(found[0])

    def quarantine(self, address: Address) -> None:
        self.delete([address])

    def list(self) -> Iterator[Stored]:
        with self._lock:
            files = list(self._files.items())
        return (Stored(address, len(memory), used_at) for address, (memory, used_at) in files)

    def close(self) -> None:
        self._files.clear()
        self.num_bytes = 0

    def _room_for(self, size: int) -> memoryview:
        """Memory for a file, for which others go. A file that is being read keeps its memory until it is."""
        while self.num_bytes + size > self.max_bytes or (memory := self._take(size)) is None:
            if not self._files:
                raise TierError(f"{size} bytes are not free in one piece")
            self.delete([next(iter(self._files))])
        return memory


def _ordinary(num_bytes: int) -> memoryview:
    """Memory that takes none until it is written to."""
    return memoryview(np.empty(num_bytes, np.uint8).data)
