# SPDX-License-Identifier: Apache-2.0
"""Eviction policies. ``docs/eviction.md`` has the measurements.

A policy records the uses of entries and ranks them; it neither frees pages nor knows of leases. Calls for an entry
that it doesn't hold have no effect, nor has adding an entry twice.
"""

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator
from typing import Generic, Literal, Protocol, TypeVar

EvictionPolicyName = Literal["lru", "s3fifo"]


class Evictable(Protocol):
    """A policy's view of a cached segment, of at least one page; its size is constant.

    It is hashed by identity; ``key`` is the same when the segment comes back.
    """

    @property
    def key(self) -> Hashable: ...

    @property
    def num_pages(self) -> int: ...


EntryT = TypeVar("EntryT", bound=Evictable)


class EvictionPolicy(Protocol[EntryT]):
    """Ranks entries, the least valuable first."""

    def added(self, entry: EntryT) -> None:
        """Records a new entry, which may be evicted."""

    def used(self, entry: EntryT) -> None:
        """Records a hit."""

    def evicted(self, entry: EntryT) -> None:
        """Records an eviction for lack of room; several come in the order of :meth:`victims`."""

    def removed(self, entry: EntryT) -> None:
        """Forgets an entry that was deleted, expired or pinned."""

    def victims(self) -> Iterator[EntryT]:
        """Every entry in order of eviction, lazily. No other call is allowed while iterating."""


class LRU(Generic[EntryT]):
    """Evicts the least recently used entry first."""

    def __init__(self) -> None:
        self._entries: OrderedDict[EntryT, None] = OrderedDict()

    def added(self, entry: EntryT) -> None:
        self._entries[entry] = None

    def used(self, entry: EntryT) -> None:
        if entry in self._entries:
            self._entries.move_to_end(entry)

    def evicted(self, entry: EntryT) -> None:
        self.removed(entry)

    def removed(self, entry: EntryT) -> None:
        self._entries.pop(entry, None)

    def victims(self) -> Iterator[EntryT]:
        yield from self._entries


class S3FIFO(Generic[EntryT]):
    """S3-FIFO: early eviction of entries without another use (Yang et al., SOSP 2023).

    New entries pass through a small queue, a tenth of the pages; entries used more than once there move on to the main
    queue. The main queue is a FIFO with as many second chances as the entry has had uses, at most three. Keys evicted
    from the small queue are remembered, and return to the main queue.
    """

    _SMALL_SHARE = 0.1
    _MOST_USES = 3

    def __init__(self) -> None:
        # Entries with their uses since they entered the queue, or since their last second chance.
        self._small: OrderedDict[EntryT, int] = OrderedDict()
        self._main: OrderedDict[EntryT, int] = OrderedDict()
        self._small_pages = 0
        self._main_pages = 0
        self._remembered: OrderedDict[Hashable, None] = OrderedDict()
        self._passed: list[EntryT] = []

    def added(self, entry: EntryT) -> None:
        if entry in self._small or entry in self._main:
            return
        if entry.key in self._remembered:
            del self._remembered[entry.key]
            self._enter_main(entry)
        else:
            self._small[entry] = 0
            self._small_pages += entry.num_pages

    def used(self, entry: EntryT) -> None:
        for queue in (self._small, self._main):
            if entry in queue:
                queue[entry] = min(queue[entry] + 1, self._MOST_USES)

    def evicted(self, entry: EntryT) -> None:
        self._turn()
        if entry in self._small:
            self._remembered[entry.key] = None
            while len(self._remembered) > max(len(self._main), 1):
                self._remembered.popitem(last=False)
        self.removed(entry)

    def removed(self, entry: EntryT) -> None:
        if self._small.pop(entry, None) is not None:
            self._small_pages -= entry.num_pages
        elif self._main.pop(entry, None) is not None:
            self._main_pages -= entry.num_pages

    def victims(self) -> Iterator[EntryT]:
        # Read-only: entries passed over move only when an entry is evicted, so a vain look ages nothing.
        passed = self._passed = []
        small, main = iter(self._small.items()), iter(self._main.items())
        small_pages, main_pages = self._small_pages, self._main_pages
        behind_main: deque[tuple[EntryT, int]] = deque()
        while pages := small_pages + main_pages:
            if small_pages > self._SMALL_SHARE * pages or not main_pages:
                entry, uses = next(small)
                small_pages -= entry.num_pages
                if uses <= 1:
                    yield entry
                    continue
                main_pages += entry.num_pages
                behind_main.append((entry, 0))
            else:
                entry, uses = next(main, None) or behind_main.popleft()
                if not uses:
                    main_pages -= entry.num_pages
                    yield entry
                    continue
                behind_main.append((entry, uses - 1))
            passed.append(entry)

    def _turn(self) -> None:
        """Moves the entries that the last look for victims passed over."""
        for entry in self._passed:
            if entry in self._small:
                self.removed(entry)
                self._enter_main(entry)
            elif entry in self._main:
                self._main[entry] = max(self._main[entry] - 1, 0)
                self._main.move_to_end(entry)
        self._passed = []

    def _enter_main(self, entry: EntryT) -> None:
        self._main[entry] = 0
        self._main_pages += entry.num_pages


def make_policy(name: EvictionPolicyName) -> EvictionPolicy[EntryT]:
    """A new, empty policy."""
    match name:
        case "lru":
            return LRU()
        case "s3fifo":
            return S3FIFO()
