# SPDX-License-Identifier: Apache-2.0
"""Numbers of segments that the workers can score, with two fake workers."""

from typing import Any

import pytest

from cache.errors import FullAttentionError
from cache.positions.layout import pack
from cache.segments.hashing import CacheScope, ChunkHash
from cache.segments.index import ChunkKVCache, PromptSegment, SegmentIdentity
from engine_ext.chunks.representations import Representations

TOKENS, WORKERS = 10, 2


class FakeWorkers:
    """``kept`` are the numbers that all workers hold; a token takes a byte on each."""

    def __init__(self) -> None:
        self.kept: set[int] = set()
        self.has_other_kv = False

    async def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[list[int] | None]:
        assert method == "chunk_cache_represent"
        segments, forgotten = args
        self.kept -= set(forgotten)
        if self.has_other_kv:
            return [None, [TOKENS] * len(segments)]
        self.kept |= {number for number, *_ in segments}
        return [[num_tokens for *_, num_tokens in segments]] * WORKERS


def entry(name: str, namespace: str = "n", key: str | None = None) -> ChunkKVCache:
    identity = SegmentIdentity(CacheScope(namespace), b"", pack(tuple(name.encode().ljust(TOKENS))))
    return ChunkKVCache(ChunkHash((key or namespace + name).encode()), identity, [0], 1, 0.0, 0.0, False)


def number(known: Representations, each: ChunkKVCache) -> int | None:
    return known.number(PromptSegment(each.key, each.identity, False, None))


async def test_segments_are_known_by_key_and_meaning() -> None:
    workers = FakeWorkers()
    known, a, b = Representations(workers, 1000), entry("a"), entry("b")  # type: ignore[arg-type]
    await known.add([a, b])
    assert {number(known, a), number(known, b)} == workers.kept == {0, 1}
    assert number(known, entry("c")) is None
    assert number(known, entry("c", key="na")) is None  # a collision
    assert known.num_bytes == 2 * TOKENS * WORKERS


async def test_the_least_recently_used_go_first_and_the_workers_learn_of_it() -> None:
    workers = FakeWorkers()
    known, a, b, c, d = Representations(workers, 2 * TOKENS * WORKERS), *map(entry, "abcd")  # type: ignore[arg-type]
    await known.add([a])
    await known.add([b])
    number(known, a)
    await known.add([c])
    assert [number(known, each) is None for each in (a, b, c)] == [False, True, False]
    await known.add([d])
    assert number(known, a) is None
    assert number(known, c) is not None
    assert 1 not in workers.kept
    await known.add(list(map(entry, "efgh")))  # of one request: all of them stay
    assert all(number(known, entry(name)) is not None for name in "efgh")


async def test_a_segment_that_is_known_or_given_twice_is_represented_once() -> None:
    workers = FakeWorkers()
    known, a, b = Representations(workers, 1000), entry("a"), entry("b")  # type: ignore[arg-type]
    await known.add([a])
    await known.add([b, a, b])
    assert [number(known, a), number(known, b)] == [0, 1]
    assert workers.kept == {0, 1}
    assert known.num_bytes == 2 * TOKENS * WORKERS


async def test_a_key_that_stands_for_another_segment_now() -> None:
    workers = FakeWorkers()
    known, a, other = Representations(workers, 1000), entry("a"), entry("b", key="na")  # type: ignore[arg-type]
    await known.add([a])
    await known.add([other])
    assert [number(known, a), number(known, other)] == [None, 1]
    await known.add([entry("c")])
    assert workers.kept == {1, 2}


async def test_other_kv_in_the_pages_is_an_error() -> None:
    workers = FakeWorkers()
    known, a = Representations(workers, 1000), entry("a")  # type: ignore[arg-type]
    workers.has_other_kv = True
    with pytest.raises(FullAttentionError):
        await known.add([a])
    assert number(known, a) is None


async def test_segments_that_were_dropped_meanwhile_are_not_remembered() -> None:
    workers = FakeWorkers()
    known, a = Representations(workers, 1000), entry("a")  # type: ignore[arg-type]
    a.detached = True
    await known.add([a])
    assert number(known, a) is None


async def test_clearing_a_namespace_or_all() -> None:
    workers = FakeWorkers()
    known, a, b = Representations(workers, 1000), entry("a", "n"), entry("b", "m")  # type: ignore[arg-type]
    await known.add([a, b])
    known.clear("n")
    assert [number(known, each) is None for each in (a, b)] == [True, False]
    known.clear()
    assert number(known, b) is None
    assert known.num_bytes == 0
    await known.add([entry("c")])
    assert workers.kept == {2}


async def test_segments_that_a_probe_uses_are_not_forgotten_for_others() -> None:
    workers = FakeWorkers()
    known, a, b = Representations(workers, TOKENS * WORKERS), entry("a"), entry("b")  # type: ignore[arg-type]
    await known.add([a])
    with known.using([0]), known.using([0]):
        await known.add([b])
        assert None not in (number(known, a), number(known, b))
    await known.add([entry("c")])
    assert [number(known, a), number(known, b)] == [None, None]
    with known.using([2]):
        known.clear()
        assert number(known, entry("c")) is None
