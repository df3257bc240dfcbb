# SPDX-License-Identifier: Apache-2.0
"""Blocks that generated tokens read: which tokens, which blocks, and what is represented when."""

import pytest
import torch

from engine_ext.core.attention.decoding import LEAST_BLOCKS, DecodingSelection
from engine_ext.core.attention.rows import BatchRow
from kernels.layout import PagedTensor
from kernels.paged import LayerKV
from kernels.rope import RotaryFrequencies
from kernels.selection import POLICIES

BLOCK, KV_HEADS, HEADS, SIZE, NUMBER, PROMPT = 4, 2, 6, 16, 5, 30
FREQUENCIES = RotaryFrequencies(torch.ones(SIZE // 2, dtype=torch.float64), True)


@pytest.fixture
def keys() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(40, BLOCK, KV_HEADS, SIZE)


def selecting(keys: torch.Tensor, prompt: int = PROMPT, number: int = NUMBER) -> DecodingSelection:
    layer = LayerKV(PagedTensor.of(keys), PagedTensor.of(keys), keys, keys, FREQUENCIES)
    return DecodingSelection({"layer": layer}, POLICIES["attention"], number, lambda names: [prompt] * len(names))


@pytest.fixture
def selection(keys: torch.Tensor) -> DecodingSelection:
    return selecting(keys)


def row(length: int, num_tokens: int = 1, first: int = 0, blocks: range = range(10, 30), name: str = "one") -> BatchRow:
    return BatchRow(name, first, num_tokens, length, blocks)


def test_tokens_of_the_prompt_and_within_the_budget_read_everything(selection, keys):
    assert selection.step([row(PROMPT, PROMPT)]) is None
    assert selection.step([row(PROMPT)]) is None
    selection = selecting(keys, prompt=2)
    assert selection.step([row(NUMBER * BLOCK)]) is None
    step = selection.step([row(NUMBER * BLOCK + 2, NUMBER * BLOCK)])
    assert step is not None
    assert step.tokens.tolist() == [NUMBER * BLOCK - 2, NUMBER * BLOCK - 1]
    assert step.lengths == [(NUMBER - 1) * BLOCK + 1, (NUMBER - 1) * BLOCK + 2]
    assert step.dense == [(0, row(NUMBER * BLOCK, NUMBER * BLOCK - 2))]


def test_each_generated_token_chooses_for_itself(selection, keys):
    step = selection.step([row(20, 3, name="other"), row(PROMPT + 6, 8, first=3)])
    assert step is not None
    assert step.dense == [(0, row(20, 3, name="other")), (1, row(PROMPT, 2, first=3))]
    assert step.tokens.tolist() == [5, 6, 7, 8, 9, 10]
    query = torch.randn(6, HEADS, SIZE)
    table = selection.table("layer", query, step, 0.3)
    assert table.shape == (6, KV_HEADS, NUMBER)
    for token, found in enumerate(table.tolist()):
        blocks = list(range(10, 10 + (PROMPT + token) // BLOCK + 1))
        between = blocks[1:-2]
        for head, chosen in enumerate(found):
            attention = torch.zeros(len(between))
            for each in query[token, head * 3 : head * 3 + 3]:
                logits = keys[between, :, head] @ each * 0.3
                attention += logits.flatten().softmax(0).view(len(between), -1).sum(1)
            best = sorted(between[i] for i in attention.topk(NUMBER - 3).indices.tolist())
            assert chosen == [blocks[0], *best, *blocks[-2:]]


def test_blocks_are_represented_once_while_the_request_runs(selection):
    def fresh(*rows: BatchRow) -> list[int]:
        step = selection.step(rows)
        return [] if step is None else step.fresh.tolist()

    assert fresh(row(37)) == [11, 12, 13, 14, 15, 16, 17]
    assert fresh(row(38)) == []
    assert fresh(row(41)) == [18]
    assert fresh(row(41, name="other")) == list(range(11, 19))
    assert fresh(row(41)) == list(range(11, 19)), "another request may have written to them"
    assert fresh(row(42, 12)) == list(range(11, 19)), "they are being written again"
    assert fresh(row(42, blocks=range(9, 29))) == list(range(10, 18))


def test_too_small_a_budget_is_refused(keys):
    with pytest.raises(ValueError, match=f"less than {LEAST_BLOCKS}"):
        selecting(keys, number=LEAST_BLOCKS - 1)
