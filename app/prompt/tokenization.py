# SPDX-License-Identifier: Apache-2.0
"""Tokenizes segments separately; a document's text never yields a control token."""

import copy
import json
import re
import threading
from collections.abc import Iterable
from functools import cached_property
from operator import attrgetter
from typing import Any

from cachetools import LRUCache, cachedmethod
from tokenizers import Tokenizer

from cache.positions.layout import PackedTokens, pack, packed_length

REMEMBERED_BYTES = 32 << 20
"""Memory for documents' packed tokens; their texts take about as much again."""

_LOOKS_LIKE_CONTROL = re.compile(r"<.*>|\[.*\]|\{.*\}", re.DOTALL)


class SegmentTokenizer:
    """Wraps the model's Hugging Face tokenizer; thread-safe."""

    def __init__(self, tokenizer: Any) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise TypeError(f"{type(tokenizer).__name__} has no fast (Rust) backend, which documents need")
        self._lock = threading.Lock()
        # A copy, since vLLM's threads use the model's own tokenizer.
        self._tokenizer = copy.deepcopy(tokenizer)
        spec = json.loads(self._tokenizer.backend_tokenizer.to_str())
        control = [token for token in spec["added_tokens"] if _is_control(token)]
        self._document_tokenizer = _without(spec, control)
        self._control_ids = frozenset(token["id"] for token in control)
        self._control_text = _alternatives(token["content"] for token in control)
        self._remembered: LRUCache[Any, PackedTokens] = LRUCache(REMEMBERED_BYTES, getsizeof=len)
        self._remembering = threading.Lock()

    def encode_template(self, text: str, *, add_special_tokens: bool = False) -> tuple[int, ...]:
        """Tokens of the chat template's text, with control tokens recognised."""
        with self._lock:
            return tuple(self._tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])

    def encode_document(self, text: str) -> tuple[int, ...]:
        """Tokens of a document; a control token's spelling is plain text."""
        ids = self._document_tokenizer.encode(text, add_special_tokens=False).ids
        if self._control_ids.isdisjoint(ids):
            return tuple(ids)
        # Plain vocabulary entries merge into a control token: encode the text in pieces cut inside its spelling.
        pieces = (self._document_tokenizer.encode(p, add_special_tokens=False).ids for p in self._broken(text))
        return tuple(id for piece in pieces for id in piece if id not in self._control_ids)

    @cachedmethod(attrgetter("_remembered"), lock=attrgetter("_remembering"))
    def pack_document(self, text: str, namespace: str) -> PackedTokens:
        """:meth:`encode_document`, packed and cached.

        Cached per namespace: timing must not reveal another namespace's documents.
        """
        return pack(self.encode_document(text))

    @cached_property
    def filler(self) -> int | None:
        """A white-space token, or ``None`` if the tokenizer has none."""
        candidates = (self.encode_document(text) for text in ("\n", " ", "\n\n", "  "))
        return next((ids[0] for ids in candidates if len(ids) == 1), None)

    def padded(self, tokens: PackedTokens, block_tokens: int | None) -> PackedTokens:
        """``tokens`` and the white space that fills their last block; unchanged if either is ``None``."""
        if block_tokens is None or self.filler is None:
            return tokens
        return tokens + pack((self.filler,)) * (-packed_length(tokens) % block_tokens)

    def _broken(self, text: str) -> Iterable[str]:
        """``text``, cut after the first character of each control token's spelling."""
        start = 0
        for match in self._control_text.finditer(text):
            yield text[start : match.start() + 1]
            start = match.start() + 1
        yield text[start:]


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
