# SPDX-License-Identifier: Apache-2.0
"""Which cached segment to give up when room is needed. ``docs/eviction.md`` has the measurements.

A policy is told what happens to segments and ranks them; it neither frees pages nor knows of leases. Telling a policy
of an entry that it doesn't hold has no effect, nor has adding one that it does.
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
    """What a policy sees of a cached segment; its size, at least a page, doesn't change while a policy holds it.

    It is hashed by identity; ``key`` is the same when the segment comes back.
    """

    @property
    def key(self) -> Hashable: ...

    @property
    def num_pages(self) -> int: ...

    @property
    def recompute_cost(self) -> float:
        """Cost of computing it again, see :func:`prefill_cost`."""


EntryT = TypeVar("EntryT", bound=Evictable)


class EvictionPolicy(Protocol[EntryT]):
    """Ranks segments by how little is lost without them."""

    def added(self, entry: EntryT) -> None:
        """``entry`` may be evicted from now on."""

    def used(self, entry: EntryT) -> None:
        """A request wanted ``entry`` and found it."""

    def evicted(self, entry: EntryT) -> None:
        """``entry`` was given up for lack of room; of several, they are named in the order of :meth:`victims`."""

    def removed(self, entry: EntryT) -> None:
        """``entry`` went for another reason: deleted, expired or pinned. Nothing of it is remembered."""

    def victims(self) -> Iterator[EntryT]:
        """Every entry, the one to give up first, lazily. Don't tell the policy anything while iterating."""


class LRU(Generic[EntryT]):
    """Gives up what was used least recently."""

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
    """Gives up what saves least per page: GreedyDual-Size with frequency (Cherkasova, HP Labs HPL-98-69R1, 1998).

    An entry's value is its uses times its cost per page, on top of the value at which entries were given up when it was
    last used: so old fame fades.
    """

    def __init__(self) -> None:
        self._inflation = 0.0
        self._uses: dict[EntryT, int] = {}
        # Valued anew, an entry gets another item in the heap; the one in ``_items`` counts.
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
        # A heap is read in order, and left as it is, by a second heap of those whose parents have been read.
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
    """Gives up early what is not soon used again: S3-FIFO (Yang et al., FIFO queues are all you need, SOSP 2023).

    New entries pass through a small queue, a tenth of the pages; those used more than once there move on to the main
    queue. That is a FIFO with as many second chances as the entry has had uses, at most three: what was popular for a
    while goes soon after. Keys given up in the small queue are remembered: coming back, they go to the main queue.
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
        # Only looks; what it passes over gets its move once something is evicted, so looking in vain ages nothing.
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
        """Moves what the last look for victims passed over."""
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
    """A new policy that holds nothing yet."""
    match name:
        case "lru":
            return LRU()
        case "gdsf":
            return GDSF()
        case "s3fifo":
            return S3FIFO()
