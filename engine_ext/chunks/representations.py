# SPDX-License-Identifier: Apache-2.0
"""Segments that the workers can score, whether or not their KV is in the pool."""

import itertools
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from vllm.v1.engine.async_llm import AsyncLLM

from cache.errors import FullAttentionError
from cache.segments.hashing import ChunkHash
from cache.segments.index import ChunkKVCache, PromptSegment, SegmentIdentity


class _Represented(NamedTuple):
    """A segment that the workers can score: its number there, and the bytes that it takes."""

    identity: SegmentIdentity
    number: int
    num_bytes: int


class Representations:
    """Numbers of the segments that the workers can score; the least recently used are forgotten first.

    A segment keeps its number when its KV leaves the pool. ``max_bytes`` is memory on all workers together.
    """

    def __init__(self, llm: AsyncLLM, max_bytes: int) -> None:
        self._llm = llm
        self._max_bytes = max_bytes
        self._known: OrderedDict[ChunkHash, _Represented] = OrderedDict()
        self._numbers = itertools.count()
        self._used: Counter[int] = Counter()
        self._forgotten: list[int] = []
        """Numbers that the workers still hold."""
        self.num_bytes = 0

    def number(self, wanted: PromptSegment) -> int | None:
        """The number of a segment; ``None`` if it can't be scored."""
        return self._number(wanted.key, wanted.identity)

    async def add(self, entries: Iterable[ChunkKVCache]) -> None:
        """Lets the workers score segments, which are leased; raises :class:`FullAttentionError`."""
        unknown = dict.fromkeys(each for each in entries if self._number(each.key, each.identity) is None)
        if not unknown:
            return
        new = {entry: next(self._numbers) for entry in unknown}
        segments = [(number, tuple(entry.pages), entry.tag, entry.num_tokens) for entry, number in new.items()]
        self._forgotten, forgotten = [], self._forgotten
        by_worker: Sequence[Sequence[int] | None] = await self._llm.collective_rpc(
            "chunk_cache_represent", args=(segments, forgotten)
        )
        if None in by_worker:
            self._forgotten += new.values()
            raise FullAttentionError("load refused", "a worker found other KV in the pages of a chunk to be scored")
        sizes = [sum(sizes) for sizes in zip(*filter(None, by_worker), strict=True)]
        for (entry, number), size in zip(new.items(), sizes, strict=True):
            # Perhaps of other weights, or another request was quicker.
            if entry.detached or self._number(entry.key, entry.identity) is not None:
                self._forgotten.append(number)
                continue
            self._forget(entry.key)  # the key may stand for another segment now
            self._known[entry.key] = _Represented(entry.identity, number, size)
            self.num_bytes += size
        for key in [key for key, known in self._known.items() if not self._used[known.number]][: -len(new)]:
            if self.num_bytes > self._max_bytes:
                self._forget(key)

    @contextmanager
    def using(self, numbers: Iterable[int]) -> Iterator[None]:
        """Forgets none of these segments within the context for want of memory."""
        used = Counter(numbers)
        self._used += used
        try:
            yield
        finally:
            self._used -= used

    def clear(self, namespace: str | None = None) -> None:
        """Forgets all segments (of ``namespace``, if given)."""
        for key, known in list(self._known.items()):
            if namespace is None or known.identity.scope.namespace == namespace:
                self._forget(key)

    def _number(self, key: ChunkHash, identity: SegmentIdentity) -> int | None:
        known = self._known.get(key)
        if known is None or known.identity != identity:
            return None
        self._known.move_to_end(key)
        return known.number

    def _forget(self, key: ChunkHash) -> None:
        if (known := self._known.pop(key, None)) is not None:
            self._forgotten.append(known.number)
            self.num_bytes -= known.num_bytes
