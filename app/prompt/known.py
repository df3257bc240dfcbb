# SPDX-License-Identifier: Apache-2.0
"""Passages that a server knows, found again in prompts by their exact text.

A prompt's hashes of 16 bytes, at every fourth place, are computed together, and most are ruled out by one look into a
table, which has those of each passage's beginning; what is left is compared. All this takes time in proportion to the
prompt. What one namespace knows, no other one finds.
"""

import threading
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, Final

import numpy as np
from cachetools import LRUCache
from numpy.typing import NDArray

from app.documents.document import is_unicode

SHORTEST: Final = 32
"""Characters of a passage that is found; a shorter one may stand in any prompt by chance."""
MOST_BYTES: Final = 32 << 20
"""Of all passages; the ones longest unused are forgotten first."""
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
_MOST_ASKED: Final = 4096


class KnownPassages:
    """Passages by namespace; thread-safe."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._lock = threading.Lock()
        self._namespaces: defaultdict[str, _Namespace] = defaultdict(_Namespace)
        self._passages = _Passages(self._namespaces, most_bytes)
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
        if len(text) < SHORTEST or _OVERHEAD_BYTES + len(passage := text.encode()) > self._passages.maxsize:
            return
        with self._lock:
            if self._passages.get((namespace, passage)) is None:
                self._passages[namespace, passage] = _OVERHEAD_BYTES + len(passage)
                self._namespaces[namespace].change(passage, is_known=True)

    def add_all(self, namespace: str, texts: Iterable[str]) -> None:
        """Remembers passages."""
        for text in texts:
            self.add(namespace, text)

    def find(self, namespace: str, text: str) -> list[tuple[int, int]]:
        """Places ``[start, end)`` of passages in ``text``: the first ones, the longest at each place; none overlap."""
        with self._lock:
            known = self._namespaces.get(namespace)
            if known is None or len(text) < SHORTEST or not is_unicode(text):
                return []
            known.update()
        # Without the lock: nobody waits for another's long prompt. What changes meanwhile is found, or not.
        data = text.encode()
        found = list(known.find(data))
        with self._lock:
            for start, end in found:
                self._passages.get((namespace, data[start:end]))  # used now
        return found if len(data) == len(text) else _in_characters(data, found)


class _Passages(LRUCache[tuple[str, bytes], int]):
    def __init__(self, namespaces: "dict[str, _Namespace]", most_bytes: int) -> None:
        super().__init__(most_bytes, getsizeof=lambda length: length)
        self._namespaces = namespaces

    def popitem(self) -> Any:
        (namespace, passage), length = super().popitem()
        known = self._namespaces[namespace]
        known.change(passage, is_known=False)
        if not known.num_passages:
            del self._namespaces[namespace]
        return (namespace, passage), length


class _Namespace:
    def __init__(self) -> None:
        self.changed: dict[bytes, bool] = {}
        """What the next search has to add (``True``) and to forget."""
        self._buckets: dict[bytes, _Bucket] = {}
        self._table: NDArray[np.bool_] = np.zeros(1 << _TABLE_BITS[0], np.bool_)
        self.num_passages = 0

    def change(self, passage: bytes, *, is_known: bool) -> None:
        """Adds a passage, or forgets one."""
        self.changed[passage] = is_known
        self.num_passages += 1 if is_known else -1

    def update(self) -> None:
        """Carries out the changes."""
        by_beginning: defaultdict[bytes, dict[bytes, bool]] = defaultdict(dict)
        for passage, is_known in self.changed.items():
            by_beginning[passage[:_BEGINNING]][passage] = is_known
        self.changed = {}
        for beginning, changes in by_beginning.items():
            bucket = self._buckets.pop(beginning, None)
            states = {**dict.fromkeys(bucket.passages if bucket else (), True), **changes}
            if passages := [passage for passage, is_known in states.items() if is_known]:
                self._buckets[beginning] = _Bucket(passages)
        if self._buckets and by_beginning:
            self._fill_table(by_beginning)

    def find(self, data: bytes) -> Iterator[tuple[int, int]]:
        """Places of passages in a text, of at least a window's length."""
        at = 0
        for place in self._candidates(data):
            for start in range(max(at, place - _STRIDE + 1), place + 1):
                bucket = self._buckets.get(data[start : start + _BEGINNING]) if start >= at else None
                if bucket is not None and (length := bucket.longest(data, start)):
                    yield start, (at := start + length)

    def _candidates(self, data: bytes) -> Iterator[int]:
        """Places before which, by less than a stride, passages may begin."""
        for start in range(0, len(data), _BLOCK):
            hashes, table = _hashes(data[start : start + _BLOCK + _WINDOW - _STRIDE]), self._table
            yield from (np.flatnonzero(table.take(_slots(hashes, table))) * _STRIDE + start).tolist()

    def _fill_table(self, beginnings: Iterable[bytes]) -> None:
        least, most = _TABLE_BITS
        size = min(max(least, (_SLOTS_PER_ENTRY * _STRIDE * len(self._buckets)).bit_length()), most)
        table = self._table
        if len(table) < 1 << size:
            table, beginnings = np.zeros(1 << size, np.bool_), self._buckets
        windows = (each[offset : offset + _WINDOW] for each in beginnings for offset in range(_STRIDE))
        table[_slots(_hashes(b"".join(windows))[:: _WINDOW // _STRIDE], table)] = True
        self._table = table


class _Bucket:
    """Passages that begin alike, sorted, each with the longest other one that it begins with."""

    def __init__(self, passages: Iterable[bytes]) -> None:
        self.passages = sorted(passages)
        self._most = max(map(len, self.passages))
        self._within: dict[bytes, bytes | None] = {}
        begun: list[bytes] = []
        for passage in self.passages:
            while begun and not passage.startswith(begun[-1]):
                begun.pop()
            self._within[passage] = begun[-1] if begun else None
            begun.append(passage)

    def longest(self, data: bytes, place: int) -> int:
        """Length of the longest passage that stands at ``place``; 0 for none."""
        ahead = data[place : place + self._most]
        number = bisect_right(self.passages, ahead)
        # A passage that is the beginning of what is ahead sorts right before it, or begins the one that does.
        candidate = self.passages[number - 1] if number else None
        while candidate is not None and not ahead.startswith(candidate):
            candidate = self._within[candidate]
        return len(candidate) if candidate is not None else 0


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
