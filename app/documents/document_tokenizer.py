# SPDX-License-Identifier: Apache-2.0
"""Tokenizes documents: their text never yields a control token."""

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

from tokenizers import Tokenizer

_AT_ONCE = 256
"""Texts that are handed to the tokenizer and taken back while others wait."""
_LOOKS_LIKE_CONTROL = re.compile(r"<.*>|\[.*\]|\{.*\}", re.DOTALL)


class DocumentTokenizer:
    """The model's tokenizer, made from its JSON, to which a control token's spelling is plain text; thread-safe."""

    def __init__(self, tokenizer: str) -> None:
        spec = json.loads(tokenizer)
        control = [token for token in spec["added_tokens"] if _is_control(token)]
        self._tokenizer = _without(spec, control)
        self._control_ids = frozenset(token["id"] for token in control)
        self._control_text = _alternatives(token["content"] for token in control)

    def encode(self, text: str) -> tuple[int, ...]:
        """Tokens of a document."""
        (ids,) = encoded(self._tokenizer, [text])
        if self._control_ids.isdisjoint(ids):
            return tuple(ids)
        # Plain vocabulary entries merge into a control token: encode the text in pieces cut inside its spelling.
        pieces = encoded(self._tokenizer, list(self._broken(text)))
        return tuple(id for piece in pieces for id in piece if id not in self._control_ids)

    def _broken(self, text: str) -> Iterable[str]:
        """``text``, cut after the first character of each control token's spelling."""
        start = 0
        for match in self._control_text.finditer(text):
            yield text[start : match.start() + 1]
            start = match.start() + 1
        yield text[start:]


def encoded(tokenizer: Tokenizer, texts: list[str], *, add_special_tokens: bool = False) -> Iterator[list[int]]:
    """Tokens of texts. Other threads run meanwhile, which ``encode`` keeps from it for eight times as long."""
    for start in range(0, len(texts), _AT_ONCE):
        part = texts[start : start + _AT_ONCE]
        for each in tokenizer.encode_batch_fast(part, add_special_tokens=add_special_tokens):
            yield each.ids


def _is_control(token: dict[str, Any]) -> bool:
    """Whether a token is special, or added and in brackets (``<think>``, ``[INST]``); not spaces or words."""
    return bool(token["special"]) or _LOOKS_LIKE_CONTROL.fullmatch(token["content"]) is not None


def _without(spec: dict[str, Any], tokens: list[dict[str, Any]]) -> Tokenizer:
    """A tokenizer that ignores ``tokens``; they stay in it as special tokens, so that ids are unchanged."""
    added = [{**token, "special": token in tokens} for token in spec["added_tokens"]]
    tokenizer = Tokenizer.from_str(
        json.dumps({**spec, "added_tokens": added, "post_processor": None, "truncation": None, "padding": None})
    )
    tokenizer.encode_special_tokens = True  # encodes special tokens as text
    return tokenizer


def _alternatives(texts: Iterable[str]) -> re.Pattern[str]:
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
