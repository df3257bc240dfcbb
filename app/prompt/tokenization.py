# SPDX-License-Identifier: Apache-2.0
"""Tokenizes segments separately; a document's text never yields a control token."""

import copy
import threading
from collections.abc import Callable
from functools import cached_property
from operator import attrgetter
from typing import Any

from cachetools import LRUCache, cachedmethod

from app.documents.document_tokenizer import DocumentTokenizer
from cache.positions.layout import PackedTokens, pack, packed_length

REMEMBERED_BYTES = 32 << 20
"""Memory for documents' packed tokens; their texts take about as much again."""


class SegmentTokenizer:
    """Wraps the model's Hugging Face tokenizer; thread-safe."""

    def __init__(self, tokenizer: Any, on_document: Callable[[str, str], None] = lambda namespace, text: None) -> None:
        """``on_document`` is called with each namespace and text that is tokenized as a document."""
        if not getattr(tokenizer, "is_fast", False):
            raise TypeError(f"{type(tokenizer).__name__} has no fast (Rust) backend, which documents need")
        self._on_document = on_document
        self._lock = threading.Lock()
        # A copy, since vLLM's threads use the model's own tokenizer.
        self._tokenizer = copy.deepcopy(tokenizer)
        self._tokenizer.backend_tokenizer.no_truncation()
        self._tokenizer.backend_tokenizer.no_padding()
        self.json: str = self._tokenizer.backend_tokenizer.to_str()
        self.most_characters = max(map(len, self._tokenizer.get_vocab()))
        """Of one token."""
        self._document_tokenizer = DocumentTokenizer(self.json)
        self._remembered: LRUCache[Any, PackedTokens] = LRUCache(REMEMBERED_BYTES, getsizeof=len)
        self._remembering = threading.Lock()

    def encode_template(self, text: str, *, add_special_tokens: bool = False) -> tuple[int, ...]:
        """Tokens of the chat template's text, with control tokens recognised."""
        with self._lock:
            backend = self._tokenizer.backend_tokenizer
            # As a batch, since other threads run meanwhile.
            (encoding,) = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            return tuple(encoding.ids)

    def encode_document(self, text: str) -> tuple[int, ...]:
        """Tokens of a document; a control token's spelling is plain text."""
        return self._document_tokenizer.encode(text)

    @cachedmethod(attrgetter("_remembered"), lock=attrgetter("_remembering"))
    def pack_document(self, text: str, namespace: str) -> PackedTokens:
        """:meth:`encode_document`, packed and cached.

        Cached per namespace: timing must not reveal another namespace's documents.
        """
        self._on_document(namespace, text)
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
