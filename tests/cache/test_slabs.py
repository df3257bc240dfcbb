# SPDX-License-Identifier: Apache-2.0
"""Pieces of memory that is allocated once."""

import random
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.tiers.memory import MemoryTier
from cache.tiers.slabs import Slabs
from cache.tiers.tier import TierError
from tests.support.tier_files import PinnedMemory, address, held

KIB = 1 << 10


@pytest.mark.parametrize(
    ("num_bytes", "taken"),
    [(64 * KIB, [64 * KIB]), (100 * KIB, [64 * KIB, 32 * KIB, 4 * KIB]), (66_000, [64 * KIB]), (5, [])],
)
def test_no_more_is_taken_than_is_said(num_bytes: int, taken: list[int]) -> None:
    memory = PinnedMemory()
    Slabs(num_bytes, memory.allocate)
    assert memory.taken == taken


@given(st.randoms(), st.lists(st.integers(0, 5000), max_size=60))
def test_no_two_have_the_same_memory_and_all_comes_back(source: random.Random, sizes: list[int]) -> None:
    slabs, lent = Slabs(12 * KIB, PinnedMemory().allocate), list[tuple[memoryview, int]]()
    for number, size in enumerate(sizes):
        if (piece := slabs.take(size)) is not None:
            assert len(piece) == size
            piece[:] = bytes([number]) * size
            lent.append((piece[size // 2 :], number))
        del piece
        if lent and source.random() < 0.5:
            lent.pop(source.randrange(len(lent)))
        assert all(set(part) <= {number} for part, number in lent)
    lent.clear()
    whole = [slabs.take(8 * KIB), slabs.take(4 * KIB)]
    assert None not in whole


def test_threads_take_and_return_pieces() -> None:
    slabs, wrong = Slabs(64 * KIB, PinnedMemory().allocate), list[int]()

    def use(number: int) -> None:
        for _ in range(300):
            if (piece := slabs.take(9 * KIB)) is not None:
                piece[:] = bytes([number]) * len(piece)
                wrong.extend(set(piece) - {number})

    threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert slabs.take(64 * KIB) is not None


def test_a_host_tier_takes_the_pinned_memory_that_it_says_when_it_is_made() -> None:
    """A file of 64 KiB and a header must not take 128 KiB."""
    memory = PinnedMemory()
    tier = MemoryTier(256 * KIB, memory.allocate)
    assert sum(memory.taken) == 256 * KIB
    for number in range(9):
        tier.put(address(number), bytes([number]) * (64 * KIB + 100))
        assert address(number) in held(tier)
    assert sum(memory.taken) == 256 * KIB
    assert len(held(tier)) == 3
    assert all(bytes(tier.get(found, 1 << 20)[:1]) == bytes([int(found.key, 16)]) for found in held(tier))


def test_a_file_that_no_slab_has_room_for_drives_no_other_away() -> None:
    tier = MemoryTier(12 * KIB, PinnedMemory().allocate)
    tier.put(address(1), b"1" * 2 * KIB)
    with pytest.raises(TierError, match="9216 bytes exceed the limit of 8192"):
        tier.put(address(2), b"2" * 9 * KIB)
    assert held(tier) == {address(1): 2 * KIB}


def test_a_file_that_is_read_keeps_its_memory_when_it_leaves_the_tier() -> None:
    tier = MemoryTier(8 * KIB, PinnedMemory().allocate)
    tier.put(address(1), b"1" * 6 * KIB)
    read = tier.get(address(1), 10)
    with pytest.raises(TierError, match="6144 bytes are not free in one piece"):
        tier.put(address(2), b"2" * 6 * KIB)
    assert read is not None
    assert bytes(read) == b"1" * 10
    assert held(tier) == {}
    del read
    tier.put(address(2), b"2" * 6 * KIB)
    assert held(tier) == {address(2): 6 * KIB}
