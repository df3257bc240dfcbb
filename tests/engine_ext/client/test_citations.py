# SPDX-License-Identifier: Apache-2.0
"""The sentences of an answer, and the chunks that each rests on."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models
from vllm.sampling_params import SamplingParams

from cache.report import Citation
from engine_ext.client.citations import AnswerSoFar, citations, sentences


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The bridge is 3.5 km long. It is old!", ["The bridge is 3.5 km long.", "It is old!"]),
        ("One line\nand another.\n\n  A third", ["One line", "and another.", "A third"]),
        ('He said "no." Then he left (at last).', ['He said "no."', "Then he left (at last)."]),
        ("桥很长。磨坊很旧。", ["桥很长。", "磨坊很旧。"]),
        ("Wait... what?! Yes", ["Wait...", "what?!", "Yes"]),
        ("1. Riga is large.\n2. Dr. Berg left.", ["1. Riga is large.", "2. Dr. Berg left."]),
        ("In 1987. No.", ["In 1987.", "No."]),
        ("The 3.", ["The 3."]),
        ("...", ["..."]),
        ("\n \n", []),
        ("", []),
    ],
)
def test_sentences(text: str, expected: list[str]) -> None:
    assert [text[start:end] for start, end in sentences(text)] == expected


def cited(text: str, ends: list[int], attention: list[list[float]], expected: list[float]) -> list[Citation]:
    return citations(text, list(zip([0, *ends], ends, strict=False)), np.array(attention), np.array(expected))


def test_each_sentence_rests_on_at_most_three_chunks_that_get_more_than_from_a_question_without_content() -> None:
    """The token " C" begins before its sentence."""
    text, ends = "A b. C d.", [1, 3, 4, 6, 9]
    attention = [[0.1, 0.0, 0.4], [0.1, 0.1, 0.2], [0.1, 0.0, 0.0], [0.8, 0.0, 0.0], [0.0, 0.4, 0.2]]
    first, second = cited(text, ends, attention, [4.0, 4.0, 2.0])
    assert (first.start, first.end) == (0, 4)
    assert [each.chunk for each in first.chunks if not each.is_weak] == [2]
    assert (first.chunks[0].share, first.chunks[0].lift) == (pytest.approx(0.6), pytest.approx(3))
    assert (second.start, second.end) == (5, 9)
    assert [each.chunk for each in second.chunks if not each.is_weak] == [0]
    (only,) = cited("Yes", [3], [[4, 5, 3, 6, 0]], [1, 1, 1, 1, 20])
    assert [each.chunk for each in only.chunks] == [3, 1, 0]


@pytest.mark.parametrize("attention", [[], [[0.0, 0.0]]])
def test_chunks_without_any_attention(attention: list[list[float]]) -> None:
    (only,) = cited("Yes", [3] * len(attention), np.zeros((len(attention), 2)), [0.0, 0.0])  # type: ignore[arg-type]
    assert all(each.is_weak for each in only.chunks)


def places(text_ids: list[int], pieces: dict[int, str]) -> list[tuple[int, int]]:
    vocabulary = {piece: token_id for token_id, piece in pieces.items()}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    renderer = SimpleNamespace(get_tokenizer=lambda: SimpleNamespace(backend_tokenizer=tokenizer))
    call: Any = SimpleNamespace(llm=SimpleNamespace(renderer=renderer), params=SamplingParams())
    return AnswerSoFar("", text_ids).places(call)


def test_bytes_that_are_no_character_have_places_too() -> None:
    """The decoder of tokens raises at them."""
    bytes_of = {number: f"<0x{byte:02X}>" for number, byte in enumerate("€".encode())}
    found = places([0, 1, 2, 0, 3, 3], {**bytes_of, 3: "a"})
    assert found[:3] == [(0, 0), (0, 0), (0, 1)]
    assert [begin for begin, _ in found] == sorted(begin for begin, _ in found)
    assert len(found) == 6
