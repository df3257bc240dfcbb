# SPDX-License-Identifier: Apache-2.0
"""Layouts: the table in cache/positions/layout.py, and its underlying rule."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.positions.layout import (
    Chunk,
    ChunkedPrompt,
    Layout,
    Place,
    PositionReindexer,
    PositionStrategy,
    pack,
    packed_length,
    split_packed,
    unpack,
)
from cache.positions.strategy import strategy_for

SHARED, PARALLEL, OFFSET, WINDOW = (PositionStrategy(name) for name in ("shared", "parallel", "offset", "window"))


def prompt_of(system: int, lengths: list[int], question: int, opening: int | None = None) -> ChunkedPrompt:
    chunks = tuple(Chunk(pack((7,) * length)) for length in lengths)
    return ChunkedPrompt((7,) * system, chunks, (7,) * question, None if opening is None else (7,) * opening)


def layout(system: int, lengths: list[int], question: int, strategy: PositionStrategy, window: int = 20) -> Layout:
    return PositionReindexer(window=window).layout(prompt_of(system, lengths, question), strategy)


POSITIONS = {  # position and delta of system segment, three chunks and question
    SHARED: ((0, 5), (5, 5), (5, 5), (5, 5), (11, 0)),  # S + max(L) = 11, D = 5
    PARALLEL: ((0, 0), (5, 0), (5, 0), (5, 0), (16, 0)),
    OFFSET: ((0, 0), (5, 0), (8, 3), (14, 9), (16, 0)),
    WINDOW: ((5, 5), (10, 5), (10, 5), (14, 9), (16, 0)),  # the longest chunk, of 6 tokens, is the window
}
REACH = {SHARED: 15, PARALLEL: 20, OFFSET: 20, WINDOW: 15}


@pytest.mark.parametrize("strategy", PositionStrategy)
def test_positions_and_rotations(strategy):
    made = layout(5, [3, 6, 2], 4, strategy, window=4)  # N = 5 + 3 + 6 + 2 = 16
    starts, lengths = (0, 5, 8, 14, 16), (5, 3, 6, 2, 4)
    expected = [Place(*each, *at) for *each, at in zip(starts, lengths, POSITIONS[strategy], strict=True)]
    assert [made.system, *made.chunks, made.question] == expected
    assert made.reach == REACH[strategy]


def test_within_the_window_positions_are_those_of_offset():
    made, offset = layout(5, [3, 6, 2], 4, WINDOW, window=11), layout(5, [3, 6, 2], 4, OFFSET)
    assert replace(made, strategy=OFFSET) == offset


lengths = st.lists(st.integers(1, 40), min_size=1, max_size=8)


@given(st.integers(0, 40), lengths, st.integers(1, 10), st.data())
@settings(derandomize=True, deadline=None)
def test_nothing_reaches_beyond_window_and_system_segment(system, chunks, question, data):
    window = data.draw(st.integers(1, 400))
    made = layout(system, chunks, question, WINDOW, window)
    assert made.reach == min(max(window, *chunks), sum(chunks)) + system + question
    other = layout(system, chunks, question, WINDOW, data.draw(st.integers(1, 400)))
    same = (made.system, made.chunks) == (other.system, other.chunks)
    assert same == (made.salt_parts() == other.salt_parts())


@pytest.mark.parametrize("strategy", PositionStrategy)
@pytest.mark.parametrize("opening", [0, 2, 9])
def test_chunks_computed_behind_an_opening_are_rotated_from_its_end(strategy, opening):
    behind_system = layout(5, [3, 6], 4, strategy)
    made = PositionReindexer().layout(prompt_of(5, [3, 6], 4, opening), strategy)
    assert (made.system, made.question) == (behind_system.system, behind_system.question)
    for one, other in zip(made.chunks, behind_system.chunks, strict=True):
        assert (one.start, one.length, one.position) == (other.start, other.length, other.position)
        assert one.delta == other.delta + 5 - opening


@pytest.mark.parametrize("strategy", PositionStrategy)
@pytest.mark.parametrize("system", [0, 5])
def test_a_single_chunk_is_not_rotated(strategy, system):
    made = layout(system, [7], 2, strategy)
    assert [p.delta for p in (made.system, *made.chunks, made.question)] == [0, 0, 0]
    assert [p.position for p in (made.system, *made.chunks, made.question)] == [0, system, system + 7]


@given(st.integers(0, 40), lengths, st.integers(1, 10), st.sampled_from(PositionStrategy))
@settings(derandomize=True, deadline=None)
def test_segments_tile_the_sequence_and_every_key_is_at_its_logical_distance_from_the_question(
    system, chunks, question, strategy
):
    """RoPE depends on differences only: the engine's question is at N + j, a rotated key at computed + delta."""
    made = layout(system, chunks, question, strategy)
    segments = [made.system, *made.chunks, made.question]
    assert [s.length for s in segments] == [system, *chunks, question]
    assert [s.start for s in segments] == [sum([system, *chunks][:i]) for i in range(len(segments))]
    assert all(s.delta >= 0 for s in segments)  # rotated forward only
    assert all(s.position + s.length <= made.question.position for s in segments[:-1])
    computed_at = [0, *[system] * len(chunks)]
    for first, place in zip(computed_at, (made.system, *made.chunks), strict=True):
        assert made.question.start - (first + place.delta) == made.question.position - place.position


def test_segments_without_tokens_are_refused():
    with pytest.raises(ValueError, match="a prompt without chunks has no chunk layout"):
        layout(3, [], 1, SHARED)
    with pytest.raises(ValueError, match="a chunk has no tokens"):
        prompt_of(3, [1, 0], 1)
    with pytest.raises(ValueError, match="the question segment has no tokens"):
        prompt_of(3, [1], 0)


def test_salt_parts_tell_layouts_of_the_same_tokens_apart():
    layouts = [layout(5, [3, 4], 1, SHARED), layout(5, [4, 3], 1, SHARED), layout(5, [3, 4], 1, OFFSET)]
    layouts += [layout(5, [7], 1, SHARED), layout(4, [4, 4], 1, SHARED)]
    assert layouts[0].salt_parts() == ["shared", 5, 3, 4]
    assert len({tuple(made.salt_parts()) for made in layouts}) == len(layouts)
    assert layout(5, [3, 4], 9, SHARED).salt_parts() == layouts[0].salt_parts()  # the question is never cached


@pytest.mark.parametrize(("length", "sizes"), [(0, []), (3, [3]), (4, [4]), (9, [4, 4, 1])])
def test_packed_tokens_are_split(length, sizes):
    pieces = split_packed(pack(tuple(range(length))), 4)
    assert [packed_length(piece) for piece in pieces] == sizes
    assert unpack(b"".join(pieces)) == tuple(range(length))


@pytest.mark.parametrize(
    ("trained_for", "strategy"),
    [(("full", "shared", "offset"), SHARED), (("parallel", "offset"), PARALLEL), (("offset",), OFFSET)],
)
def test_a_model_gets_what_it_was_trained_for(trained_for, strategy):
    assert strategy_for(trained_for).described() == f"{strategy} (the model was trained for it)"


@pytest.mark.parametrize("trained_for", [(), ("full",), ("window-9",)])
def test_others_get_what_loses_least_and_are_told_what_to_do(trained_for):
    found = strategy_for(trained_for)
    assert (found.strategy, found.is_known) == (OFFSET, False)
    told = found.described()
    assert told.startswith("offset (the model was not trained for chunk reuse; what reuse costs it was not measured, ")
    assert told.endswith("tessera calibrate)")


BLOCK = 8
IN_PLACE = PositionReindexer("in-place", BLOCK)


@pytest.mark.parametrize(
    ("system", "lengths", "strategy", "opening", "placement"),
    [
        *((system, [8, 16], PARALLEL, None, "in-place") for system in (0, 8)),
        *((8, [8], strategy, None, "in-place") for strategy in (SHARED, OFFSET)),
        *((8, [8, 8], strategy, None, "copy") for strategy in (SHARED, OFFSET)),
        *((8, [8, 9], PARALLEL, None, "copy"), (7, [8], PARALLEL, None, "copy"), (8, [8], PARALLEL, 8, "copy")),
    ],
)
def test_chunks_in_whole_blocks_that_keep_their_positions_are_in_place(system, lengths, strategy, opening, placement):
    prompt = prompt_of(system, lengths, 3, opening)
    made, copied = IN_PLACE.layout(prompt, strategy), PositionReindexer().layout(prompt, strategy)
    assert made == replace(copied, placement=placement)
    assert (made.salt_parts() == copied.salt_parts()) == (placement == "copy")


@pytest.mark.parametrize(
    ("lengths", "strategy", "turns"), [([8, 8], PARALLEL, False), ([8], OFFSET, False), ([8, 8], OFFSET, True)]
)
def test_keys_of_a_quantized_cache_that_turn_are_rounded_once_more(lengths, strategy, turns):
    prompt = prompt_of(8, lengths, 3)
    assert PositionReindexer(is_quantized=True).layout(prompt, strategy).is_requantized == turns
    assert not PositionReindexer().layout(prompt, strategy).is_requantized


@pytest.mark.parametrize("strategy", PositionStrategy)
def test_whatever_its_layout_a_request_attends_to_the_pool(strategy):
    prompt = prompt_of(5, [9, 2], 3)
    made = PositionReindexer("attend").layout(prompt, strategy)
    assert made == replace(PositionReindexer().layout(prompt, strategy), placement="attend")


@pytest.mark.parametrize("strategy", PositionStrategy)
@pytest.mark.parametrize("kept", [(), (1,), (0, 2), (2,)])
def test_chunks_that_are_kept_stay_as_far_from_the_question(strategy, kept):
    whole = layout(5, [3, 6, 2], 4, strategy, window=4)
    made = whole.keeping(kept)
    chunks = [whole.chunks[index] for index in kept]
    assert [chunk.length for chunk in made.chunks] == [chunk.length for chunk in chunks]
    starts = [place.start for place in (made.system, *made.chunks, made.question)]
    lengths = [5, *(chunk.length for chunk in chunks)]
    assert starts == [sum(lengths[:number]) for number in range(len(lengths) + 1)]
    assert made.num_left_out == whole.question.start - made.question.start == 11 - sum(lengths[1:])
    # A key's position, seen by the engine, is where it was computed plus its rotation; the question's is its index.
    for before, after in zip((whole.system, *chunks), (made.system, *made.chunks), strict=True):
        assert after.position == before.position
        assert made.question.start - after.delta == whole.question.start - before.delta


def test_all_chunks_kept_are_the_same_layout_and_others_have_other_salts():
    whole = layout(5, [3, 3, 2], 4, OFFSET)
    assert whole.keeping((0, 1, 2)) is whole
    parts = [tuple(whole.keeping(kept).salt_parts()) for kept in ((), (0,), (1,), (0, 1), (0, 2), (1, 2), (0, 1, 2))]
    assert len(set(parts)) == len(parts)


def test_chunks_in_place_are_copied_when_others_are_left_out():
    whole = IN_PLACE.layout(prompt_of(8, [8] * 3, 3), PARALLEL)
    assert whole.placement == "in-place"
    assert whole.keeping((0, 2)).placement == "copy"
