# SPDX-License-Identifier: Apache-2.0
"""Random texts: their lengths in the prompt, and with a model's tokenizer."""

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from app.documents.document import Document
from measuring.kit.texts import Texts, characters_per_token


@pytest.mark.parametrize("tokens", [3, 4, 32, 512])
def test_lengths_are_exact_with_a_byte_level_model(tokens, model):
    assert characters_per_token(model) == 1.0
    for number in range(50):
        texts = Texts(str(number))
        text, chunk = texts.text(tokens), texts.chunk(tokens)
        assert text == text.strip()
        assert (len(text), len(Document(chunk).render())) == (tokens, tokens)


def test_the_seed_decides_and_texts_are_short_rather_than_empty():
    assert Texts("a").chunks(3, 9) == Texts("a").chunks(3, 9) != Texts("b").chunks(3, 9)
    assert len(set(Texts("a").chunks(9, 20))) == 9
    assert len(Texts("").text(1)) == len(Texts("").chunk(1)) == 1


@pytest.mark.parametrize("size", [0, 1, 2, 9])
def test_another_order_is_another(size):
    items = list(range(size))
    for number in range(20):
        order = Texts(str(number)).shuffled(items)
        assert sorted(order) == items
        assert (order != items) == (size > 1)


def test_lengths_follow_the_models_tokenizer(tmp_path):
    pairs = [(a, b) for a in "abcdefghijklmnopqrstuvwxyz" for b in "abcdefghijklmnopqrstuvwxyz"]
    letters = {letter: i for i, letter in enumerate("abcdefghijklmnopqrstuvwxyz ")}
    vocabulary = letters | {a + b: len(letters) + i for i, (a, b) in enumerate(pairs)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "isolated")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ratio = characters_per_token(tmp_path)
    assert 1.5 < ratio < 2
    assert len(tokenizer.encode(Texts("x", ratio).text(1000)).ids) == pytest.approx(1000, rel=0.05)
