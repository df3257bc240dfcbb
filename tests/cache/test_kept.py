# SPDX-License-Identifier: Apache-2.0
"""Memory that is lent again."""

import numpy as np
import pytest
import torch

from cache.tiers import kept
from cache.tiers.kept import KeptMemory
from tests.support.tier_files import PinnedMemory


@pytest.fixture(params=["ordinary", "staged"])
def memory(request, monkeypatch):
    monkeypatch.setattr(kept, "STAGED_BYTES", 1 << 12)
    return KeptMemory(PinnedMemory().allocate if request.param == "staged" else None)


def place(lent):
    return np.frombuffer(lent, np.uint8).ctypes.data


def test_memory_is_lent_to_one_at_a_time_and_then_to_the_next(memory):
    first, second = memory.take(10), memory.take(10)
    places = {place(first), place(second)}
    first[:], second[:] = b"a" * 10, b"b" * 10
    assert bytes(first) == b"a" * 10
    del first, second
    third, fourth = memory.take(7), memory.take(10)
    assert len(third) == 7
    assert {place(third), place(fourth)} == places
    del third, fourth
    assert len(memory.take(11)) == 11


@pytest.mark.parametrize(
    "user",
    [
        lambda lent: lent[3:7],
        lambda lent: torch.frombuffer(lent, dtype=torch.uint8, offset=4, count=2),
        lambda lent: torch.frombuffer(lent, dtype=torch.uint8).view(2, 5)[1],
    ],
    ids=["part", "tensor", "view of a tensor"],
)
def test_whoever_holds_a_part_holds_the_memory(memory, user):
    lent = memory.take(10)
    lent[:] = b"a" * 10
    first, held = place(lent), user(lent)
    del lent
    memory.take(10)[:] = b"b" * 10
    assert set(memoryview(held if isinstance(held, memoryview) else held.numpy())) == {ord("a")}
    del held
    again = [memory.take(10), memory.take(10)]
    assert first in map(place, again)


def test_only_some_pieces_of_ordinary_memory_are_kept():
    memory = KeptMemory()
    lent = [memory.take(5) for _ in range(10)]
    places = set(map(place, lent))
    del lent
    assert len(memory._kept) == 8
    assert {place(memory.take(5))} <= places


def test_pinned_memory_is_allocated_once_and_what_does_not_fit_is_ordinary(monkeypatch):
    monkeypatch.setattr(kept, "STAGED_BYTES", 1 << 12)
    pinned = PinnedMemory()
    memory = KeptMemory(pinned.allocate)
    lent = [memory.take(3000), memory.take(3000), memory.take(9000)]
    for number, piece in enumerate(lent):
        piece[:] = bytes([number]) * len(piece)
    assert [set(piece) for piece in lent] == [{0}, {1}, {2}]
    assert pinned.taken == [1 << 12]
