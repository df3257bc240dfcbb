# SPDX-License-Identifier: Apache-2.0
"""Document keys, which replicas and routers compute without a tokenizer."""

from collections.abc import Iterable

import xxhash

from cache.segments.hashing import framed
from cache.segments.holdings import DocumentKey


def text_keys(context: Iterable[str], texts: Iterable[str]) -> list[DocumentKey]:
    """Keys of documents by text; ``context`` is model, namespace and system prompt, which also determine their KV."""
    head = xxhash.xxh3_128(b"text" + _framed(context))  # hashed once: context may be long, and texts many
    return [_key(head.copy(), text) for text in texts]


def id_key(namespace: str, id: str) -> DocumentKey:
    """Key of the document registered under ``id``."""
    return DocumentKey(xxhash.xxh3_128_digest(b"id" + _framed([namespace, id])))


def _key(digest: xxhash.xxh3_128, text: str) -> DocumentKey:
    digest.update(_framed([text]))
    return DocumentKey(digest.digest())


def _framed(texts: Iterable[str]) -> bytes:
    return b"".join(framed(text.encode(errors="surrogatepass")) for text in texts)
