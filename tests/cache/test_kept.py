# SPDX-License-Identifier: Apache-2.0
"""Memory that is lent again."""

from cache.tiers.kept import KeptMemory


def test_memory_is_lent_to_one_at_a_time_and_then_to_the_next():
    made = []

    def allocate(num_bytes):
        made.append(num_bytes)
        return memoryview(bytearray(num_bytes))

    memory = KeptMemory(allocate)
    with memory.lend(10) as first, memory.lend(10) as second:
        first[:], second[:] = b"a" * 10, b"b" * 10
        assert bytes(first) == b"a" * 10
    with memory.lend(7) as third, memory.lend(10):
        assert len(third) == 7
    assert made == [10, 10]
    with memory.lend(11) as longer:
        assert len(longer) == 11
    assert made == [10, 10, 11]


def test_only_some_pieces_are_kept():
    made = []
    memory = KeptMemory(lambda size: (made.append(size), memoryview(bytearray(size)))[1])
    for _ in range(2):
        lent = [memory.take(5) for _ in range(6)]
        for each in lent:
            memory.give(each)
    assert len(made) == 6 + 2
