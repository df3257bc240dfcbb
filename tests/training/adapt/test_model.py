# SPDX-License-Identifier: Apache-2.0
"""Rows are read as the reference composes chunks; unknown architectures are refused."""

import random
from typing import Any

import pytest
import torch

from cache.positions.layout import Chunk, ChunkedPrompt, pack
from tests.oracle import Oracle
from training.adapt import model as adapted
from training.adapt.model import UnknownArchitectureError, load, log_probabilities
from training.adapt.rows import Branch, make_row

TOLERANCE = 1e-4


def tokens(count: int, seed: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(4, 260) for _ in range(count))


SYSTEM, CHUNKS = tokens(17, 1), [tokens(40, 3), tokens(25, 4), tokens(33, 5)]
BRANCHES = [Branch(tokens(11, 6), tokens(5, 7)), Branch(tokens(3, 8), tokens(9, 9))]
PROMPT = ChunkedPrompt(SYSTEM, tuple(Chunk(pack(each)) for each in CHUNKS), (0,))


@pytest.mark.parametrize("way", ["full", "offset", "shared", "parallel"])
def test_each_branch_is_read_as_the_reference_reads_it_alone(model: Any, folder: Any, way: Any) -> None:
    oracle = Oracle(folder)
    with torch.no_grad():
        found = log_probabilities(model, make_row(PROMPT, BRANCHES, way))
    start = 0
    for branch in BRANCHES:
        expected = oracle.score(way, (SYSTEM, CHUNKS, branch.question), branch.answer).distributions
        first = start + len(branch.question) - 1
        start += len(branch.tokens)
        torch.testing.assert_close(found[first:start], expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("way", ["full", "offset"])
def test_bfloat16_is_near_float32(model: Any, folder: Any, way: Any) -> None:
    half = load(folder, dtype=torch.bfloat16)
    assert {each.dtype for each in half.parameters()} == {torch.bfloat16}
    assert half.model.rotary_emb.inv_freq.dtype == torch.float32
    row = make_row(PROMPT, BRANCHES, way)
    with torch.no_grad():
        found, expected = log_probabilities(half, row), log_probabilities(model, row)
    torch.testing.assert_close(found, expected, rtol=0, atol=0.1)
    assert not torch.equal(found, expected)


def test_gradients_flow_through_turned_keys(model: Any) -> None:
    log_probabilities(model, make_row(PROMPT, BRANCHES, "offset")).mean().backward()
    weight = model.model.layers[0].self_attn.k_proj.weight
    assert float(weight.grad.abs().max()) > 0


def test_a_wrong_turn_and_windows_are_refused(folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    turned = adapted._turned
    monkeypatch.setattr(adapted, "_turned", lambda key, cos, sin: turned(key, cos, -sin))
    with pytest.raises(UnknownArchitectureError, match="its attention differs"):
        load(folder)
    monkeypatch.undo()
    plain = adapted.AutoModelForCausalLM.from_pretrained

    def with_windows(*arguments: Any, **options: Any) -> Any:
        found = plain(*arguments, **options)
        found.config.layer_types = ["full_attention", "sliding_attention"]
        return found

    monkeypatch.setattr(adapted.AutoModelForCausalLM, "from_pretrained", with_windows)
    with pytest.raises(UnknownArchitectureError, match="full_attention, sliding_attention"):
        load(folder)
