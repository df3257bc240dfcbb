# SPDX-License-Identifier: Apache-2.0
"""Host memory: the fastest tier, which ends with the process."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator

from cache.segments.holdings import HOST
from cache.tiers.tier import Address, Buffer, Stored, TierError


class MemoryTier:
    """A :class:`cache.tiers.tier.StorageTier` in this process. ``allocate`` gives memory, pinned for instance."""

    name = HOST

    def __init__(self, max_bytes: int, allocate: Callable[[int], memoryview] | None = None) -> None:
        self.max_bytes = max_bytes
        self._allocate = allocate or (lambda size: memoryview(bytearray(size)))
        self._files: OrderedDict[Address, tuple[memoryview, float]] = OrderedDict()
        self.num_bytes = 0
        self._lock = threading.RLock()

    def put(self, address: Address, file: Buffer) -> None:
        size = len(file)
        if size > self.max_bytes:
            raise TierError(f"{size} bytes exceed the limit of {self.max_bytes}")
        if address in self._files:
            return
        with self._lock:
            while self.num_bytes + size > self.max_bytes:
                self.delete(next(iter(self._files)))
            self.num_bytes += size
        try:
            memory = self._allocate(size)
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

    def delete(self, address: Address) -> None:
        with self._lock:
            if (found := self._files.pop(address, None)) is not None:
                self.num_bytes -= len(found[0])

    def quarantine(self, address: Address) -> None:
        self.delete(address)

    def list(self) -> Iterator[Stored]:
        with self._lock:
            files = list(self._files.items())
        return (Stored(address, len(memory), used_at) for address, (memory, used_at) in files)

    def close(self) -> None:
        self._files.clear()
        self.num_bytes = 0
