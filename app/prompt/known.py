# SPDX-License-Identifier: Apache-2.0
"""Passages that a server knows, found again in prompts by their exact text.

A prompt's hashes of 16 bytes, at every fourth place, are computed together, and most are ruled out by one look into a
table, which has those of each passage's beginning; what is left is compared. All this takes time in proportion to the
prompt, however many passages there are. What one namespace knows, no other one finds.
"""

import threading
from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from cachetools import LRUCache
from numpy.typing import NDArray

from cache.segments.hashing import CacheScope

SHORTEST: Final = 32
"""Characters of a passage that is found; a shorter one may stand in any prompt by chance."""
MOST_BYTES: Final = 32 << 20
"""Of all passages; whoever has most forgets the one longest unused."""
_WINDOW: Final = 16
"""Bytes that are hashed."""
_STRIDE: Final = 4
"""A text is hashed at every fourth byte, so the beginning of a passage is at each of four offsets."""
_BEGINNING: Final = _WINDOW + _STRIDE - 1
_BLOCK: Final = 1 << 16
"""Bytes that are hashed at once, so that they stay in the processor's cache."""
_FACTOR: Final = 0x9E3779B1
_TABLE_BITS: Final = (12, 24)
_SLOTS_PER_ENTRY: Final = 256
_OVERHEAD_BYTES: Final = 512
"""Of each passage."""
_MOST_COMPARED: Final = 64
"""Bytes compared for each one of a text, beside those of ``_ALWAYS_COMPARED``; text that repeats itself needs more."""
_ALWAYS_COMPARED: Final = 1 << 20
_MOST_ASKED: Final = 4096
_Passages = LRUCache[tuple[str, bytes], int]
"""Sizes by namespace and passage."""


class KnownPassages:
    """Passages by namespace; thread-safe."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._lock = threading.Lock()
        self._most_bytes = most_bytes
        self._num_bytes = 0
        self._namespaces: defaultdict[str, _Namespace] = defaultdict(_Namespace)
        self._of_owners: defaultdict[str, _Passages] = defaultdict(
            lambda: LRUCache(most_bytes, getsizeof=lambda size: size)
        )
        self._asked: LRUCache[str, bool] = LRUCache(_MOST_ASKED)

    def is_new(self, namespace: str) -> bool:
        """Whether this is asked of a namespace for the first time."""
        with self._lock:
            was_asked = namespace in self._asked
            self._asked[namespace] = True
        return not was_asked

    def add(self, namespace: str, text: str) -> None:
        """Remembers a passage, if it is long enough to be found."""
        text = text.strip("\n").rstrip()
        if len(text) < SHORTEST or (size := _OVERHEAD_BYTES + len(passage := text.encode())) > self._most_bytes:
            return
        with self._lock:
            if self._use(namespace, passage):
                return
            while self._num_bytes + size > self._most_bytes:
                self._forget_one()
            self._of_owners[CacheScope(namespace).owner][namespace, passage] = size
            self._num_bytes += size
            self._namespaces[namespace].add(passage)

    def add_all(self, namespace: str, texts: Iterable[str]) -> None:
        """Remembers passages."""
        for text in texts:
            self.add(namespace, text)

    def find(self, namespace: str, text: str) -> list[tuple[int, int]]:
        """Places ``[start, end)`` of passages in ``text``: the first ones, the longest at each place; none overlap.

        In a text that repeats itself for long, the search may end early.
        """
        with self._lock:
            known = self._namespaces.get(namespace)
        if known is None or len(text) < SHORTEST:
            return []
        # Without the lock: nobody waits for another's long prompt. What changes meanwhile is found, or not.
        with known.lock:
            with self._lock:
                changes = known.take_changes()
            known.update(*changes)
        data = text.encode()
        found = list(known.find(data))
        with self._lock:
            for start, end in found:
                self._use(namespace, data[start:end])
        return found if len(data) == len(text) else _in_characters(data, found)

    def _use(self, namespace: str, passage: bytes) -> bool:
        """Notes that a passage is used now; whether it is known."""
        held = self._of_owners.get(CacheScope(namespace).owner)
        return held is not None and held.get((namespace, passage)) is not None

    def _forget_one(self) -> None:
        owner, held = max(self._of_owners.items(), key=lambda each: each[1].currsize)
        (namespace, passage), size = held.popitem()
        self._num_bytes -= size
        if not held:
            del self._of_owners[owner]
        known = self._namespaces[namespace]
        known.forget(passage)
        if not known.num_passages:
            del self._namespaces[namespace]


class _Namespace:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        """Of the buckets."""
        self.num_passages = 0
        self._buckets: dict[bytes, _Bucket] = {}
        self._table: NDArray[np.bool_] = np.zeros(1 << _TABLE_BITS[0], np.bool_)
        self._num_stale = 0
        """Beginnings that are in the table, but in no bucket."""
        self._added = set[bytes]()
        self._forgotten = set[bytes]()
        """Passages in the buckets that are to be forgotten, before those that are new are added."""

    def add(self, passage: bytes) -> None:
        """Adds a passage at the next update."""
        self._added.add(passage)
        self.num_passages += 1

    def forget(self, passage: bytes) -> None:
        """Forgets a passage at the next update."""
        if passage in self._added:
            self._added.remove(passage)
        else:
            self._forgotten.add(passage)
        self.num_passages -= 1

    def take_changes(self) -> tuple[set[bytes], set[bytes]]:
        """The passages to add and to forget; from now on there are none."""
        changes = self._added, self._forgotten
        self._added, self._forgotten = set(), set()
        return changes

    def update(self, added: Iterable[bytes], forgotten: Iterable[bytes]) -> None:
        """Carries out changes."""
        for passage in forgotten:
            bucket = self._buckets[passage[:_BEGINNING]]
            bucket.remove(passage)
            if not bucket.passages:
                del self._buckets[passage[:_BEGINNING]]
                self._num_stale += 1
        begun: list[bytes] = []
        for passage in added:
            beginning = passage[:_BEGINNING]
            if beginning not in self._buckets:
                self._buckets[beginning] = _Bucket()
                begun.append(beginning)
            self._buckets[beginning].add(passage)
        if begun or self._num_stale > len(self._buckets):
            self._fill_table(begun)

    def find(self, data: bytes) -> Iterator[tuple[int, int]]:
        """Places of passages in a text, of at least a window's length."""
        at, search = 0, _Search(data)
        for place in self._candidates(data):
            for start in range(max(at, place - _STRIDE + 1), place + 1):
                if start < at:
                    continue
                with self.lock:
                    bucket = self._buckets.get(data[start : start + _BEGINNING])
                    passage = bucket.longest(search, start) if bucket is not None else None
                if passage is not None:
                    yield start, (at := start + len(passage))
            if search.num_compared > _ALWAYS_COMPARED + _MOST_COMPARED * len(data):
                return

    def _candidates(self, data: bytes) -> Iterator[int]:
        """Places before which, by less than a stride, passages may begin."""
        for start in range(0, len(data), _BLOCK):
            hashes, table = _hashes(data[start : start + _BLOCK + _WINDOW - _STRIDE]), self._table
            yield from (np.flatnonzero(table.take(_slots(hashes, table))) * _STRIDE + start).tolist()

    def _fill_table(self, beginnings: Iterable[bytes]) -> None:
        least, most = _TABLE_BITS
        size = min(max(least, (_SLOTS_PER_ENTRY * _STRIDE * len(self._buckets)).bit_length()), most)
        table = self._table
        if len(table) < 1 << size or self._num_stale > len(self._buckets):
            table, beginnings, self._num_stale = np.zeros(1 << size, np.bool_), self._buckets, 0
        windows = (each[offset : offset + _WINDOW] for each in beginnings for offset in range(_STRIDE))
        table[_slots(_hashes(b"".join(windows))[:: _WINDOW // _STRIDE], table)] = True
        self._table = table


@dataclass
class _Search:
    data: bytes
    chains: "dict[bytes, list[bytes]]" = field(default_factory=dict)
    num_compared: int = 0
    """Bytes."""


class _Bucket:
    """Passages that begin alike, sorted, each with the longest other one that it begins with."""

    __slots__ = ("_within", "passages")

    def __init__(self) -> None:
        self.passages: list[bytes] = []
        self._within: dict[bytes, bytes | None] = {}

    def add(self, passage: bytes) -> None:
        """Adds a passage that isn't there."""
        self._within[passage] = self.longest(_Search(passage), 0)
        insort(self.passages, passage)
        self._set_within(passage, passage)

    def remove(self, passage: bytes) -> None:
        """Removes a passage."""
        del self.passages[bisect_left(self.passages, passage)]
        self._set_within(passage, self._within.pop(passage))

    def _set_within(self, beginning: bytes, longest: bytes | None) -> None:
        """``longest`` is what all passages begin with that have no longer ``beginning``."""
        place = bisect_right(self.passages, beginning)
        while place < len(self.passages) and (passage := self.passages[place]).startswith(beginning):
            self._within[passage] = longest
            place += 1
            if place < len(self.passages) and self.passages[place].startswith(passage):
                place = bisect_left(self.passages, passage + b"\xff", place)  # a byte that UTF-8 never has

    def longest(self, search: _Search, place: int) -> bytes | None:
        """The longest passage that stands at ``place``."""
        size = SHORTEST
        while True:
            ahead = search.data[place : place + size]
            search.num_compared += len(ahead)
            number = bisect_right(self.passages, ahead)
            goes_on = number < len(self.passages) and self.passages[number].startswith(ahead)
            if len(ahead) < size or not goes_on:
                break
            size *= 2
        if not number:
            return None
        # A passage that is the beginning of what is ahead sorts right before it, or begins the one that does.
        candidate = self.passages[number - 1]
        if ahead.startswith(candidate):
            return candidate
        chain = self._chain(candidate, search.chains)
        fitting = bisect_right(chain, _num_in_common(candidate, ahead), key=len) if chain else 0
        return chain[fitting - 1] if fitting else None

    def _chain(self, passage: bytes, chains: dict[bytes, list[bytes]]) -> list[bytes]:
        """The other passages that a passage begins with, the shortest first."""
        if passage not in chains:
            chain, within = list[bytes](), self._within[passage]
            while within is not None:
                chain.append(within)
                within = self._within[within]
            chains[passage] = chain[::-1]
        return chains[passage]


def _num_in_common(one: bytes, other: bytes) -> int:
    """How many of the first bytes are the same."""
    most = min(len(one), len(other))
    return bisect_left(range(1, most + 1), True, key=lambda length: one[:length] != other[:length])


def _hashes(data: bytes) -> NDArray[np.uint32]:
    """Hash of the whole window that begins at each stride."""
    hashes = np.frombuffer(data, "<u4", len(data) // _STRIDE) * np.uint32(_FACTOR)
    hashes ^= hashes >> np.uint32(15)
    length = 1
    while length < _WINDOW // _STRIDE:
        later = hashes[length:] * np.uint32(_FACTOR)
        later ^= hashes[:-length]
        hashes, length = later * np.uint32(_FACTOR), 2 * length
    return hashes


def _slots(hashes: NDArray[np.uint32], table: NDArray[np.bool_]) -> NDArray[np.intp]:
    """The place of each hash in a table."""
    bits = len(table).bit_length() - 1
    return (hashes >> np.uint32(32 - bits)).astype(np.intp)


def _in_characters(data: bytes, places: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Places in bytes of UTF-8 as places in characters."""
    found, at, characters = [], 0, 0
    for start, end in places:
        first = characters + len(data[at:start].decode())
        characters, at = first + len(data[start:end].decode()), end
        found.append((first, characters))
    return found
