# SPDX-License-Identifier: Apache-2.0
"""Memory that is lent again."""

import pytest
import torch

from cache.tiers.kept import KeptMemory


@pytest.fixture
def made():
    return []


@pytest.fixture
def memory(made):
    def allocate(num_bytes):
        made.append(num_bytes)
        return memoryview(bytearray(num_bytes))

    return KeptMemory(allocate)


def test_memory_is_lent_to_one_at_a_time_and_then_to_the_next(memory, made):
    first, second = memory.take(10), memory.take(10)
    first[:], second[:] = b"a" * 10, b"b" * 10
    assert bytes(first) == b"a" * 10
    del first, second
    third, _ = memory.take(7), memory.take(10)
    assert len(third) == 7
    assert made == [10, 10]
    del third, _
    assert len(memory.take(11)) == 11
    assert made == [10, 10, 11]


@pytest.mark.parametrize(
    "user",
    [
        lambda lent: lent[3:7],
        lambda lent: torch.frombuffer(lent, dtype=torch.uint8, offset=4, count=2),
        lambda lent: torch.frombuffer(lent, dtype=torch.uint8).view(2, 5)[1],
    ],
    ids=["part", "tensor", "view of a tensor"],
)
def test_whoever_holds_a_part_holds_the_memory(memory, made, user):
    lent = memory.take(10)
    lent[:] = b"a" * 10
    held = user(lent)
    del lent
    memory.take(10)[:] = b"b" * 10
    assert set(memoryview(held if isinstance(held, memoryview) else held.numpy())) == {ord("a")}
    assert made == [10, 10]
    del held
    _ = memory.take(10), memory.take(10)
    assert made == [10, 10]


def test_only_some_pieces_are_kept(memory, made):
    for _ in range(2):
        lent = [memory.take(5) for _ in range(10)]
        del lent
    assert len(made) == 10 + 2
