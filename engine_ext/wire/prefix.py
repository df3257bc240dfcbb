# SPDX-License-Identifier: Apache-2.0
"""Prefixes of prompts in tiers: blocks of vLLM's prefix cache, as files, between app, engine and workers."""

import hashlib
from dataclasses import dataclass
from typing import Any, Final, Self

PREFIX_KEY: Final = "tessera_prefix"
"""Key of a :class:`PrefixTag` in ``kv_transfer_params``."""
LEAST_TOKENS: Final = 128
"""Tokens in a file at least: a file system takes as long for a small file as for one of these."""
_BLOCK_BYTES, _SCOPE_BYTES = 17, 8


@dataclass(frozen=True, slots=True)
class PrefixTag:
    """Marks a request whose prefix may come from tiers, and goes there.

    ``namespace`` is a digest. Of a prefix that ends before token ``at_least`` nothing is used: the rest of the chunks
    would be computed as if they saw one another.
    """

    namespace: str
    at_least: int = 0

    @classmethod
    def of(cls, namespace: str, at_least: int = 0) -> Self:
        """The tag of a request in this namespace."""
        return cls(namespace_digest(namespace), at_least)

    def to_params(self) -> dict[str, Any]:
        """The tag as ``kv_transfer_params``."""
        return {PREFIX_KEY: [self.namespace, self.at_least]}

    @classmethod
    def from_params(cls, params: dict[str, Any] | None) -> "PrefixTag | None":
        """The tag in ``kv_transfer_params``, or ``None`` if there is none."""
        fields = (params or {}).get(PREFIX_KEY)
        return None if fields is None else cls(*fields)


def blocks_per_file(block_tokens: int) -> int:
    """Blocks in a file, for blocks of so many tokens."""
    return max(1, LEAST_TOKENS // block_tokens)


def blocks_address(address: str) -> str:
    """Address of a worker's block files, from that of its file server."""
    return f"{address}-blocks"


def namespace_digest(namespace: str) -> str:
    """A namespace in the names of files, in hexadecimal."""
    return _digest(namespace.encode(), _SCOPE_BYTES).hex()


def engine_digest(fingerprint: str) -> str:
    """An engine in the names of files, in hexadecimal."""
    return _digest(fingerprint.encode(), _SCOPE_BYTES).hex()


def file_key(fingerprint: str, namespace: str, key: str) -> str:
    """Key of a block's file, in hexadecimal.

    Longer than any chunk's key: digests of the block with its prefix, of the engine, and of the namespace.
    """
    return _digest(bytes.fromhex(key), _BLOCK_BYTES).hex() + engine_digest(fingerprint) + namespace


def is_block_of(found: str, fingerprint: str, namespace: str) -> bool:
    """Whether ``found`` is a :func:`file_key` of this engine and, if given, of this namespace."""
    start = 2 * _BLOCK_BYTES
    return is_block(found) and found.startswith(engine_digest(fingerprint), start) and found.endswith(namespace)


def is_block(found: str) -> bool:
    """Whether a file's key is a block's, not a chunk's."""
    return len(found) == 2 * (_BLOCK_BYTES + 2 * _SCOPE_BYTES)


def _digest(data: bytes, size: int) -> bytes:
    return hashlib.sha256(data).digest()[:size]
