# SPDX-License-Identifier: Apache-2.0
"""Tokenizes segments, each on its own; a document's text can't produce a control token."""

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

from cache.positions.layout import PackedTokens, pack

REMEMBERED_BYTES = 32 << 20
"""Of documents' packed tokens; their text takes about as much again."""

_LOOKS_LIKE_CONTROL = re.compile(r"<.*>|\[.*\]|\{.*\}", re.DOTALL)


class SegmentTokenizer:
    """Wraps the model's Hugging Face tokenizer; safe to call from several threads."""

    def __init__(self, tokenizer: Any) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise TypeError(f"{type(tokenizer).__name__} has no fast (Rust) backend, which documents need")
        self._lock = threading.Lock()
        # A copy: the model's own is used by vLLM's threads.
        self._tokenizer = copy.deepcopy(tokenizer)
        spec = json.loads(self._tokenizer.backend_tokenizer.to_str())
        control = [token for token in spec["added_tokens"] if _is_control(token)]
        self._document_tokenizer = _without(spec, control)
        self._control_ids = frozenset(token["id"] for token in control)
        self._control_text = _alternatives(token["content"] for token in control)
        self._remembered: LRUCache[Any, PackedTokens] = LRUCache(REMEMBERED_BYTES, getsizeof=len)
        self._remembering = threading.Lock()

    def encode_template(self, text: str, *, add_special_tokens: bool = False) -> tuple[int, ...]:
        """Tokens of text that the chat template rendered: control tokens are recognised."""
        with self._lock:
            return tuple(self._tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])

    def encode_document(self, text: str) -> tuple[int, ...]:
        """Tokens of a document: text that spells a control token arrives as plain text."""
        ids = self._document_tokenizer.encode(text, add_special_tokens=False).ids
        if self._control_ids.isdisjoint(ids):
            return tuple(ids)
        # The vocabulary itself spells a control token: encode around the places where it is spelled.
        pieces = (self._document_tokenizer.encode(p, add_special_tokens=False).ids for p in self._broken(text))
        return tuple(id for piece in pieces for id in piece if id not in self._control_ids)

    @cachedmethod(attrgetter("_remembered"), lock=attrgetter("_remembering"))
    def pack_document(self, text: str, namespace: str) -> PackedTokens:
        """:meth:`encode_document`, packed, and remembered.

        For each namespace on its own: how long it takes must not tell what another one has sent.
        """
        return pack(self.encode_document(text))

    @cached_property
    def filler(self) -> int | None:
        """A token of white space, or ``None`` if there is none."""
        candidates = (self.encode_document(text) for text in ("\n", " ", "\n\n", "  "))
        return next((ids[0] for ids in candidates if len(ids) == 1), None)

    def _broken(self, text: str) -> Iterable[str]:
        """``text`` cut behind the first character of each control token that it spells."""
        start = 0
        for match in self._control_text.finditer(text):
            yield text[start : match.start() + 1]
            start = match.start() + 1
        yield text[start:]


def _is_control(token: dict[str, Any]) -> bool:
    """Special tokens, and added ones in brackets (``<think>``, ``[INST]``); not runs of spaces or words."""
    return bool(token["special"]) or _LOOKS_LIKE_CONTROL.fullmatch(token["content"]) is not None


def _without(spec: dict[str, Any], tokens: list[dict[str, Any]]) -> Tokenizer:
    """The tokenizer blind to ``tokens``. They stay in it, as special ones, so that no other token's id moves."""
    added = [{**token, "special": token in tokens} for token in spec["added_tokens"]]
    tokenizer = Tokenizer.from_str(
        json.dumps({**spec, "added_tokens": added, "post_processor": None, "truncation": None, "padding": None})
    )
    tokenizer.encode_special_tokens = True  # as text, that is
    return tokenizer


def _alternatives(texts: Iterable[str]) -> re.Pattern[str]:
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
