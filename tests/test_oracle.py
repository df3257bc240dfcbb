# SPDX-License-Identifier: Apache-2.0
"""The oracle is consistent wherever two of its computations must agree."""

import random

import pytest
import torch

from app.models.random_model import build_preset
from tests.oracle import Oracle, mask

TOLERANCE = 1e-5


@pytest.fixture(scope="module", params=["tiny-llama", "tiny-qwen3"])
def oracle(request, tmp_path_factory):
    """In double precision, so that differences are errors instead of rounding (1e-5 in single precision)."""
    path = build_preset(request.param, tmp_path_factory.mktemp("models") / request.param)
    return Oracle(path, torch.float64)


def tokens(count, seed):
    rng = random.Random(seed)
    return [rng.randrange(4, 260) for _ in range(count)]


SYSTEM, QUESTION = tokens(17, 1), tokens(11, 2)
CHUNKS = [tokens(40, 3), tokens(25, 4), tokens(33, 5)]
SEGMENTS = (SYSTEM, CHUNKS, QUESTION)


def difference(one, other):
    return difference_of(one.distributions, other.distributions)


def difference_of(one, other):
    return float((one - other).abs().max())


@pytest.mark.parametrize("chunks", [[], CHUNKS[:1]])
def test_with_at_most_one_chunk_all_strategies_are_plain_causal_attention(oracle, chunks):
    segments = (SYSTEM, chunks, QUESTION)
    full = oracle.full([*SYSTEM, *(token for chunk in chunks for token in chunk), *QUESTION], 6)
    for strategy in ("shared", "parallel", "offset"):
        answer = oracle.answer(strategy, segments, 6)
        assert answer.tokens == full.tokens
        assert difference(answer, full) < TOLERANCE


def test_several_chunks_make_the_strategies_differ(oracle):
    """Otherwise tests against the oracle could pass with any strategy."""
    full, shared, offset = (oracle.score(name, SEGMENTS, [50]) for name in ("full", "shared", "offset"))
    assert min(difference(full, shared), difference(full, offset), difference(shared, offset)) > 0.1


def test_the_order_of_chunks_makes_a_difference_to_offset_but_none_to_shared(oracle):
    first, second, third = CHUNKS
    reordered = (SYSTEM, [third, first, second], QUESTION)
    assert difference(oracle.score("shared", reordered, [50]), oracle.score("shared", SEGMENTS, [50])) < TOLERANCE
    assert difference(oracle.score("offset", reordered, [50]), oracle.score("offset", SEGMENTS, [50])) > 0.1


@pytest.mark.parametrize("strategy", ["full", "shared", "offset"])
def test_decoding_with_a_cache_agrees_with_reading_everything_anew(oracle, strategy):
    given = [70, 71, 72, 73]
    scored = oracle.score(strategy, SEGMENTS, given)
    for step, token in enumerate(given):
        anew = oracle.score(strategy, (SYSTEM, CHUNKS, [*QUESTION, *given[:step]]), [token])
        assert difference_of(anew.distributions[0], scored.distributions[step]) < TOLERANCE
        assert anew.logprobs[0] == pytest.approx(scored.logprobs[step], abs=TOLERANCE)


@pytest.mark.parametrize("strategy", ["full", "shared", "offset"])
def test_reading_in_blocks_agrees_with_one_forward(oracle, strategy, monkeypatch):
    whole = oracle.score(strategy, SEGMENTS, [70, 71])
    monkeypatch.setattr(oracle, "query_block", 7)
    assert difference(oracle.score(strategy, SEGMENTS, [70, 71]), whole) < TOLERANCE


@pytest.mark.parametrize("strategy", ["shared", "offset"])
def test_greedy_tokens_are_scored_as_they_were_generated(oracle, strategy):
    answer = oracle.answer(strategy, SEGMENTS, 5)
    again = oracle.score(strategy, SEGMENTS, answer.tokens)
    assert again.logprobs == pytest.approx(answer.logprobs, abs=TOLERANCE)
    assert answer.distributions.argmax(-1).tolist() == answer.tokens


def test_a_chunk_sees_the_system_segment_and_nothing_of_another_chunk(oracle):
    first, second, third = CHUNKS
    logits = oracle.shared_logits(SEGMENTS)
    assert difference_of(logits[-1].log_softmax(-1), oracle.answer("shared", SEGMENTS, 1).distributions[0]) < TOLERANCE
    changed = oracle.shared_logits((SYSTEM, [first, tokens(len(second), 99), third], QUESTION))
    moved = (logits - changed).abs().amax(-1)
    start = len(SYSTEM) + len(first)
    end = start + len(second)
    assert float(moved[:start].max()) < TOLERANCE  # system, first chunk
    assert float(moved[start:end].min()) > 0.01  # the changed chunk itself
    assert float(moved[end : end + len(third)].max()) < TOLERANCE  # third chunk, though it comes later
    assert float(moved[-len(QUESTION) :].min()) > 0.01  # the question sees every chunk
    changed = oracle.shared_logits(([*SYSTEM[:-1], (SYSTEM[-1] - 4 + 1) % 256 + 4], CHUNKS, QUESTION))
    moved = (logits - changed).abs().amax(-1)
    assert float(moved[: len(SYSTEM) - 1].max()) < TOLERANCE
    for begin in (17, 57, 82):  # each chunk's first token
        assert float(moved[begin]) > 0.01


def test_what_is_moved_has_the_same_values_and_the_keys_of_its_new_place(oracle):
    """The model rounds angles to single precision: at position 145 by up to 1e-5, with keys of up to 10."""
    here, there = (oracle._keys_and_values(CHUNKS[0], moved_by) for moved_by in (5, 105))
    frequencies = oracle.model.model.rotary_emb.inv_freq.double()
    cos, sin = torch.cos(100 * frequencies), torch.sin(100 * frequencies)
    for (keys, values), (moved_keys, moved_values) in zip(here, there, strict=True):
        first, second = keys.chunk(2, dim=-1)
        rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        torch.testing.assert_close(moved_keys, rotated, atol=2e-4, rtol=0)
        torch.testing.assert_close(moved_values, values, atol=2e-4, rtol=0)


@pytest.mark.parametrize("strategy", ["shared", "offset"])
def test_chunks_isolated_behind_the_system_segment_itself_are_those_of_scope_system(oracle, strategy):
    of_scope_system = oracle.score(strategy, SEGMENTS, [70, 71])
    assert difference(oracle.score(strategy, SEGMENTS, [70, 71], opening=SYSTEM), of_scope_system) < TOLERANCE
    # Otherwise tests of scope isolated could pass with any scope.
    assert difference(oracle.score(strategy, SEGMENTS, [70, 71], opening=SYSTEM[:4]), of_scope_system) > 0.1


@pytest.mark.parametrize("strategy", ["shared", "offset"])
@pytest.mark.parametrize("opening", [[], tokens(5, 6), tokens(30, 7)])
def test_one_isolated_chunk_without_a_system_segment_only_misses_the_opening_in_between(oracle, strategy, opening):
    """The question then sees the chunk, at the same distance as in a row, without the opening."""
    chunk = CHUNKS[0]
    isolated = oracle.score(strategy, ([], [chunk], QUESTION), [70, 71], opening=opening)
    row, hidden = [*opening, *chunk, *QUESTION, 70], len(opening)
    groups = [-1] * hidden + [-2] * (len(row) - hidden)
    rows = mask(groups, groups, torch.float64)
    rows[:, :, hidden + len(chunk) :, :hidden] = float("-inf")
    seen = oracle._forward(row, range(len(row)), rows, None, last=0)[-2:].log_softmax(-1)
    assert difference_of(isolated.distributions, seen) < TOLERANCE


def test_bfloat16_weights_can_be_read_as_either_type(tmp_path):
    path = build_preset("tiny-llama", tmp_path / "model", dtype="bfloat16")
    exact = Oracle(path, torch.float32).score("offset", SEGMENTS, [70, 71])
    rounded = Oracle(path, torch.bfloat16).score("offset", SEGMENTS, [70, 71])
    assert rounded.distributions.dtype == torch.float32
    assert 1e-4 < difference(exact, rounded) < 1.0


def test_whole_chunks_computed_anew_are_full_attention(oracle):
    following = tokens(5, 9)
    full = oracle.score("full", SEGMENTS, following)
    whole = [[(0, len(chunk))] for chunk in CHUNKS]
    assert difference(oracle.score("offset", SEGMENTS, following, windows=whole), full) < TOLERANCE
    halves = [[(0, len(chunk) // 2), (len(chunk) // 2, len(chunk))] for chunk in CHUNKS]
    assert difference(oracle.score("offset", SEGMENTS, following, windows=halves), full) < TOLERANCE
    some = [[], [(2, 5)], *[[] for _ in CHUNKS[2:]]]
    assert difference(oracle.score("offset", SEGMENTS, following, windows=some), full) > 1e-3
    partly = oracle.score("offset", SEGMENTS, following, windows=some)
    assert difference(partly, oracle.score("offset", SEGMENTS, following)) > 1e-3


def test_attention_of_a_question_is_the_models_own(oracle):
    """Over what is computed anew as a whole, it is that of plain eager attention."""
    system, chunks, question = SEGMENTS
    got = oracle.attention("offset", (system, chunks[:1], question), [1])
    model = oracle.model
    model.config._attn_implementation = "eager"
    ids = torch.tensor([[*system, *chunks[0], *question]])
    weights = model(ids, output_attentions=True).attentions[1][0, :, -len(question) :].mean((0, 1))
    expected = weights[len(system) : len(system) + len(chunks[0])].tolist()
    assert got[0] == pytest.approx(expected, abs=1e-5)
