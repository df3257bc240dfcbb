# SPDX-License-Identifier: Apache-2.0
"""Content-addressed keys of cached segments."""

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from cache.config import HashAlgorithm
from cache.layout import PackedTokens


@dataclass(frozen=True, slots=True)
class ChunkHash:
    """Key of one cached segment. Equal keys still have their token ids compared before a hit is believed."""

    digest: bytes

    def __str__(self) -> str:
        return self.digest.hex()


@dataclass(frozen=True, slots=True)
class CacheScope:
    """What separates caches inside one engine: keys of two scopes never match.

    ``adapter`` names the LoRA adapter ("" for the base model).
    """

    namespace: str = "default"
    adapter: str = ""

    def __str__(self) -> str:
        return f"{len(self.namespace)}:{self.namespace}{self.adapter}"


class ChunkHasher:
    """Hashes token ids into keys, one engine fingerprint mixed into each."""

    def __init__(self, fingerprint: str, algorithm: HashAlgorithm = "xxh3_128") -> None:
        self._fingerprint = fingerprint.encode()
        self._digest = _ALGORITHMS[algorithm]
        # Clients may choose salts themselves; they must not be able to choose, or guess, one of these.
        self._salt_nonce = secrets.token_bytes(16)

    def system_key(self, scope: CacheScope, tokens: PackedTokens) -> ChunkHash:
        """Key of a system segment, or an opening, computed from position 0."""
        return self._key(b"system", scope, b"", tokens)

    def chunk_key(self, scope: CacheScope, prefix: ChunkHash, tokens: PackedTokens) -> ChunkHash:
        """Key of a chunk computed directly behind the segment ``prefix``."""
        return self._key(b"chunk", scope, prefix.digest, tokens)

    def layout_salt(self, scope: CacheScope, parts: Sequence[int | str]) -> str:
        """Salt that keeps one layout's composed blocks apart in the engine's own prefix cache, in this process."""
        fields = [b"layout", self._salt_nonce, str(scope).encode(), *(str(part).encode() for part in parts)]
        return "tessera-" + self._hash(fields).hex()

    def _key(self, kind: bytes, scope: CacheScope, parent: bytes, tokens: PackedTokens) -> ChunkHash:
        return ChunkHash(self._hash([kind, str(scope).encode(), parent, tokens]))

    def _hash(self, fields: Sequence[bytes]) -> bytes:
        # Each field is preceded by its length, so no two different field lists have the same bytes.
        framed = (len(f).to_bytes(8, "little") + f for f in (self._fingerprint, *fields))
        return self._digest(b"".join(framed))


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _xxh3_128(data: bytes) -> bytes:
    return xxhash.xxh3_128(data).digest()


_ALGORITHMS = {"xxh3_128": _xxh3_128, "sha256": _sha256}
