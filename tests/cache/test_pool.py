# SPDX-License-Identifier: Apache-2.0
"""The pool hands out each page once."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.config import ChunkCacheConfig
from cache.pool import ChunkBlockPool


def test_pages_lie_side_by_side_if_so_many_do():
    """Whatever was freed in whatever order: scattered pages take a copy each."""
    pool = ChunkBlockPool(12)
    held = [pool.allocate(size) for size in (2, 3, 2, 3, 2)]
    for number in (3, 0, 2):
        pool.free(held[number])
    assert pool.allocate(5) == [5, 6, 7, 8, 9]
    assert pool.allocate(1) == [0]
    pool.free(held[4])
    assert pool.allocate(3) == [1, 10, 11]  # no three lie side by side


@pytest.mark.parametrize("field", ["num_pages", "page_tokens"])
def test_sizes_must_be_positive(field):
    with pytest.raises(ValueError, match=f"{field} must be at least 1, got 0"):
        ChunkCacheConfig(**{"num_pages": 1, "page_tokens": 1, field: 0}, fingerprint="")


def test_exhaustion_takes_nothing():
    pool = ChunkBlockPool(3)
    pool.allocate(2)
    free = pool.free_pages()
    with pytest.raises(MemoryError, match="2 pages wanted, 1 of 3 free"):
        pool.allocate(2)
    assert (pool.num_free, pool.free_pages()) == (1, free)
    assert pool.allocate(1) == sorted(free)


@pytest.mark.parametrize("again", [[0], [0, 1], [2, 1], [2, 2]])
def test_freeing_a_page_twice_is_refused_and_frees_none(again):
    pool = ChunkBlockPool(3)
    pool.allocate(3)
    pool.free([0, 1])
    with pytest.raises(ValueError, match="freed twice"):
        pool.free(again)
    assert pool.free_pages() == {0, 1}
    assert pool.num_free == 2


@given(st.lists(st.one_of(st.integers(0, 5), st.none()), max_size=40))
@settings(derandomize=True, deadline=None)
def test_a_page_is_free_or_owned_by_one(steps):
    """A number allocates that many pages; ``None`` frees the oldest allocation."""
    pool, held = ChunkBlockPool(8), []
    for step in steps:
        if step is None:
            if held:
                pool.free(held.pop(0))
        elif step <= pool.num_free:
            held.append(pool.allocate(step))
        owned = [page for pages in held for page in pages]
        assert len(owned) == len(set(owned))
        assert pool.free_pages() == set(range(8)) - set(owned)
        assert pool.num_free == 8 - len(owned)
