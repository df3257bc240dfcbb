# SPDX-License-Identifier: Apache-2.0
"""Texts of a given length in tokens, never seen before: random letters."""

import random
import string
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

Item = TypeVar("Item")

_MIDDLE = string.ascii_lowercase + " "
_SAMPLE_CHARACTERS = 4096
_CHUNK_END = 2
"""Line feeds that the server puts behind each chunk; tokens of a byte-level model."""


class Texts:
    """The same seed gives the same texts. With a byte-level model (1 character per token) lengths are exact."""

    def __init__(self, seed: str, characters_per_token: float = 1.0) -> None:
        self._random = random.Random(seed)
        self._characters_per_token = characters_per_token

    def text(self, tokens: int) -> str:
        """Begins and ends with a letter, since white space there would be stripped."""
        return self._text(round(tokens * self._characters_per_token))

    def chunk(self, tokens: int) -> str:
        """A chunk of this length in the prompt, including the separator that the server adds."""
        return self._text(round(tokens * self._characters_per_token) - _CHUNK_END)

    def chunks(self, number: int, tokens: int) -> list[str]:
        """So many chunks of so many tokens each."""
        return [self.chunk(tokens) for _ in range(number)]

    def shuffled(self, items: Sequence[Item]) -> list[Item]:
        """Another order of distinct items, if there are more than one."""
        order = list(items)
        while order == list(items) and len(items) > 1:
            self._random.shuffle(order)
        return order

    def _text(self, characters: int) -> str:
        first, last = self._random.choices(string.ascii_lowercase, k=2)
        return (first + "".join(self._random.choices(_MIDDLE, k=max(characters - 2, 0))) + last)[: max(characters, 1)]


def characters_per_token(model: Path) -> float:
    """Characters per token of such a text, with the tokenizer in this folder; raises ``OSError``."""
    from tokenizers import Tokenizer

    file = model / "tokenizer.json"
    if not file.is_file():
        raise FileNotFoundError(f"{file}: no such file; texts are sized with the model's tokenizer")
    sample = Texts("sample").text(_SAMPLE_CHARACTERS)
    return len(sample) / len(Tokenizer.from_file(str(file)).encode(sample, add_special_tokens=False).ids)
