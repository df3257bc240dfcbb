# SPDX-License-Identifier: Apache-2.0
from hypothesis import given
from hypothesis import strategies as st

from cache.positions.layout import Place
from cache.windows import choose_windows, recomputed_tokens

SIZE = 4


def places(*lengths: int, start: int = 3) -> list[Place]:
    found = []
    for length in lengths:
        found.append(Place(start, length, start, 0))
        start += length
    return found


def test_the_windows_with_most_attention_are_taken_while_they_fit() -> None:
    attention = [0.0] * 4 + [1.0] * 4 + [0.0] * 2 + [3.0] * 4 + [2.0] * 4 + [0.5]
    chunks = places(10, 9)
    assert choose_windows(attention, chunks, 4, SIZE) == [(13, 17)]
    assert choose_windows(attention, chunks, 8, SIZE) == [(13, 21)]  # one behind the other: joined
    assert choose_windows(attention, chunks, 12, SIZE) == [(7, 11), (13, 21)]
    assert choose_windows(attention, chunks, 5, SIZE) == [(13, 17), (21, 22)]  # the largest of those that still fit
    assert choose_windows(attention, chunks, 0, SIZE) == []


def test_windows_of_two_chunks_are_not_joined() -> None:
    assert choose_windows([1.0] * 8, places(4, 4), 8, SIZE) == [(3, 7), (7, 11)]


@given(st.lists(st.integers(1, 13), min_size=1, max_size=5), st.floats(0, 1), st.randoms(use_true_random=False))
def test_runs_are_whole_windows_within_chunks_and_the_budget(lengths, share, random) -> None:
    chunks = places(*lengths)
    budget = recomputed_tokens(share, chunks)
    attention = [random.random() - 0.3 for _ in range(sum(lengths))]
    runs = choose_windows(attention, chunks, budget, SIZE)
    assert runs == sorted(runs)
    assert sum(end - first for first, end in runs) <= budget
    for first, end in runs:
        (chunk,) = (each for each in chunks if each.start <= first and end <= each.start + each.length)
        assert (first - chunk.start) % SIZE == 0
        assert (end - chunk.start) % SIZE == 0 or end == chunk.start + chunk.length
