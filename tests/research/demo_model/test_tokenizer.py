# SPDX-License-Identifier: Apache-2.0
"""The tokenizer is lossless and splits numbers into digit pairs."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from research.demo_model.tokenizer import SPECIAL_TOKENS, VOCABULARY


def test_vocabulary_numbers_and_chat_template(tokenizer: Any) -> None:
    assert len(tokenizer) == VOCABULARY
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == [0, 1, 2, 3]
    pieces = [tokenizer.decode([token]) for token in tokenizer("is 73421.")["input_ids"]]
    assert pieces[-4:] == [" 73", "42", "1", "."]
    messages = [{"role": "user", "content": "Who?"}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == "<|system|>Answer from the documents.<|end|><|user|>Who?<|end|><|assistant|>"
    messages.insert(0, {"role": "system", "content": "Be brief."})
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "<|system|>Be brief.<|end|><|user|>Who?<|end|>"


def test_text_comes_back(tokenizer: Any) -> None:
    @given(st.text(max_size=60).filter(lambda text: "<|" not in text))
    def check(text: str) -> None:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text

    check()
