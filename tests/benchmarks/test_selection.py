# SPDX-License-Identifier: Apache-2.0
"""What is measured by `benchmarks.selection` is what servers compute."""

import itertools
import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.selection import Context, any_rows, favourites, first_of_each
from tests.oracle import Oracle
from tools.random_model import build_preset

SYSTEM, QUESTION = 9, 7


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_preset("tiny-llama", tmp_path_factory.mktemp("selection") / "model")


@pytest.fixture(scope="module")
def context(folder: Path) -> Context:
    draw = random.Random(3).randrange
    system, *chunks = ([draw(256) for _ in range(n)] for n in (SYSTEM, 20, 5, 31))
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    return Context(model, system, chunks)


def segments(context: Context) -> tuple[list[int], list[list[int]], list[int]]:
    ids, bounds = context.ids.tolist(), [*context.starts, len(context.ids)]
    chunks = [ids[start:end] for start, end in itertools.pairwise(bounds)]
    return ids[:SYSTEM], chunks, list(range(50, 50 + QUESTION))


@pytest.mark.parametrize("number", [0, 1, 8, 40])
def test_first_rows_anew_are_link_tokens(context: Context, folder: Path, number: int) -> None:
    parts = segments(context)
    expected = Oracle(folder).score("offset", parts, [5], links=(number, "chained") if number else None)
    logits = context.logits(parts[2], first_of_each(context, number))
    assert logits[-1].log_softmax(-1) == pytest.approx(expected.distributions[0], abs=1e-4)


def test_all_rows_anew_are_full_attention(context: Context, folder: Path) -> None:
    parts = segments(context)
    expected = Oracle(folder).score("full", parts, [5])
    assert context.logits(parts[2], context.movable)[-1].log_softmax(-1) == pytest.approx(
        expected.distributions[0], abs=1e-4
    )


def test_favourites_are_those_with_the_most_attention(context: Context) -> None:
    question = segments(context)[2]
    scores = context.attention(question)
    chosen = favourites(context, question, 4)
    others = context.movable[~torch.isin(context.movable, chosen)]
    assert len(chosen) == len(first_of_each(context, 4)) == len(any_rows(context, 0, 4))
    assert scores[chosen].min() >= scores[others].max()
