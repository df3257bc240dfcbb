# SPDX-License-Identifier: Apache-2.0
"""The index: least recently used first; an equal key of other tokens is a miss."""

import pytest

from cache.positions.layout import pack
from cache.segments.hashing import CacheScope, ChunkHash
from cache.segments.index import ChunkHashIndex, ChunkKVCache, SegmentIdentity

SCOPE = CacheScope()
IDENTITY = SegmentIdentity(SCOPE, pack((1, 2)), pack((3, 4)))


def entry(name: str, identity: SegmentIdentity = IDENTITY) -> ChunkKVCache:
    return ChunkKVCache(ChunkHash(name.encode()), identity, [], 0, 0.0, 0.0, is_system=False)


def filled(*names: str) -> tuple[ChunkHashIndex, list[ChunkKVCache]]:
    index, entries = ChunkHashIndex(), [entry(name) for name in names]
    for each in entries:
        assert index.put(each) is None
    return index, entries


def test_entries_come_oldest_first():
    index, (a, b, c) = filled("a", "b", "c")
    assert index.get(a.key, IDENTITY) is a
    assert index.by_key(a.key) is a
    assert list(index) == [a, b, c]
    assert len(index) == 3


def test_an_identity_gives_its_tokens_back():
    assert (IDENTITY.prefix_ids, IDENTITY.token_ids) == ((1, 2), (3, 4))
    assert (IDENTITY.num_prefix_tokens, IDENTITY.num_tokens) == (2, 2)


def test_an_absent_key_is_a_miss():
    index, (a,) = filled("a")
    assert index.get(ChunkHash(b"b"), IDENTITY) is None
    assert list(index) == [a]


@pytest.mark.parametrize(
    "other",
    [
        SegmentIdentity(CacheScope("tenant"), pack((1, 2)), pack((3, 4))),
        SegmentIdentity(CacheScope(adapter="lora"), pack((1, 2)), pack((3, 4))),
        SegmentIdentity(SCOPE, pack((1,)), pack((2, 3, 4))),
        SegmentIdentity(SCOPE, pack((1, 2)), pack((4, 3))),
        SegmentIdentity(SCOPE, pack((1, 2)), pack((3,))),
    ],
)
def test_an_equal_key_of_other_content_is_a_miss_and_no_use(other):
    index, (a, b) = filled("a", "b")
    assert index.get(a.key, other) is None
    assert list(index) == [a, b]


def test_put_returns_what_it_displaces():
    index, (a, b) = filled("a", "b")
    newer = entry("a", SegmentIdentity(SCOPE, b"", pack((5,))))
    assert index.put(newer) is a
    assert list(index) == [b, newer]
    assert index.get(a.key, IDENTITY) is None
    assert index.get(a.key, newer.identity) is newer


def test_remove_spares_another_entry_of_the_same_key():
    index, (a, b) = filled("a", "b")
    newer = entry("a")
    index.put(newer)
    index.remove(a)
    assert list(index) == [b, newer]
    index.remove(newer)
    index.remove(newer)
    assert list(index) == [b]
