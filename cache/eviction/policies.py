# SPDX-License-Identifier: Apache-2.0
"""Eviction policies. ``docs/eviction.md`` has the measurements.

A policy records the uses of entries and ranks them; it neither frees pages nor knows of leases. Calls for an entry
that it doesn't hold have no effect, nor has adding an entry twice.
"""

import heapq
import itertools
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator
from typing import Generic, Literal, Protocol, TypeVar

EvictionPolicyName = Literal["lru", "gdsf", "s3fifo"]

ATTENTION_EQUALS_MATRICES = 8192
"""Context at which attention costs a token as much as the model's matrices do.

A layer of hidden size h has about 12 h² weights, so 24 h² operations per token; attention to a context of c tokens
takes 4 h c. They are equal at c = 6 h: 8192 is right for a hidden size of 1365, and larger models have it later; but
attention reaches less of a device's peak than matrix products do, which moves it down again.
"""


def prefill_cost(prefix_tokens: int, tokens: int) -> float:
    """Relative cost of computing ``tokens`` behind ``prefix_tokens``, in tokens computed without any context.

    A token attends to the prefix and, on average, to half of its own segment.
    """
    return tokens * (1 + (prefix_tokens + tokens / 2) / ATTENTION_EQUALS_MATRICES)


class Evictable(Protocol):
    """A policy's view of a cached segment, of at least one page; its size is constant.

    It is hashed by identity; ``key`` is the same when the segment comes back.
    """

    @property
    def key(self) -> Hashable: ...

    @property
    def num_pages(self) -> int: ...

    @property
    def recompute_cost(self) -> float:
        """Cost of computing it again (:func:`prefill_cost`)."""


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


class GDSF(Generic[EntryT]):
    """GreedyDual-Size with frequency (Cherkasova, HP Labs HPL-98-69R1, 1998): evicts the lowest value per page.

    An entry's value is its uses times its cost per page, plus the value of evicted entries at its last use, so that
    old uses lose weight.
    """

    def __init__(self) -> None:
        self._inflation = 0.0
        self._uses: dict[EntryT, int] = {}
        # A revalued entry gets another item in the heap; only the item in ``_items`` counts.
        self._heap: list[tuple[float, int, EntryT]] = []
        self._items: dict[EntryT, tuple[float, int, EntryT]] = {}
        self._order = itertools.count()

    def added(self, entry: EntryT) -> None:
        if entry not in self._uses:
            self._count(entry)

    def used(self, entry: EntryT) -> None:
        if entry in self._uses:
            self._count(entry)

    def evicted(self, entry: EntryT) -> None:
        if entry in self._items:
            self._inflation = max(self._inflation, self._items[entry][0])
            self.removed(entry)

    def removed(self, entry: EntryT) -> None:
        self._uses.pop(entry, None)
        self._items.pop(entry, None)

    def victims(self) -> Iterator[EntryT]:
        while self._heap and not self._counts(self._heap[0]):
            heapq.heappop(self._heap)
        # A second heap, of items whose parents have been read, reads the first one in order without changing it.
        front = [(item, 0) for item in self._heap[:1]]
        while front:
            item, index = heapq.heappop(front)
            if self._counts(item):
                yield item[2]
            for child in range(2 * index + 1, min(2 * index + 3, len(self._heap))):
                heapq.heappush(front, (self._heap[child], child))

    def _count(self, entry: EntryT) -> None:
        self._uses[entry] = self._uses.get(entry, 0) + 1
        value = self._inflation + self._uses[entry] * entry.recompute_cost / entry.num_pages
        self._items[entry] = (value, next(self._order), entry)
        if len(self._heap) < 2 * len(self._items):
            heapq.heappush(self._heap, self._items[entry])
        else:
            self._heap = list(self._items.values())
            heapq.heapify(self._heap)

    def _counts(self, item: tuple[float, int, EntryT]) -> bool:
        return self._items.get(item[2]) is item


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
        case "gdsf":
            return GDSF()
        case "s3fifo":
            return S3FIFO()
