# SPDX-License-Identifier: Apache-2.0
"""Content-addressed keys of cached segments."""

import hashlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from xxhash import xxh3_128_digest

from cache.positions.layout import PackedTokens


# Named tuples, since planning a request makes, hashes and compares hundreds of them.
class ChunkHash(NamedTuple):
    """Key of one cached segment. Token ids are compared too before a hit counts."""

    digest: bytes

    def __str__(self) -> str:
        return self.digest.hex()


class CacheScope(NamedTuple):
    """A separate cache inside one engine: keys of two scopes never match.

    ``adapter`` names the LoRA adapter ("" for the base model).
    """

    namespace: str = "default"
    adapter: str = ""

    @property
    def owner(self) -> str:
        """The namespace without the client's own salt, which is a secret."""
        return self.namespace.partition("\0")[0]

    def __str__(self) -> str:
        return f"{len(self.namespace)}:{self.namespace}{self.adapter}"


class ChunkHasher:
    """Hashes token ids into keys, one engine fingerprint mixed into each.

    ``has_adapter``: an adapter runs where chunks are computed; which one, the fingerprint tells.
    """

    def __init__(self, fingerprint: str, *, has_adapter: bool = False) -> None:
        self._fingerprint = fingerprint.encode()
        self._has_adapter = has_adapter

    def system_key(self, scope: CacheScope, tokens: PackedTokens) -> ChunkHash:
        """Key of a system segment, or an opening, computed from position 0."""
        return ChunkHash(xxh3_128_digest(self._framed([b"system", str(scope).encode(), b"", tokens])))

    def chunk_keys(self, scope: CacheScope, prefix: ChunkHash, chunks: Iterable[PackedTokens]) -> list[ChunkHash]:
        """Keys of chunks computed directly behind the segment ``prefix``."""
        head = self._framed([b"chunk", str(scope).encode(), prefix.digest])
        return [ChunkHash(xxh3_128_digest(head + framed(tokens))) for tokens in chunks]

    def layout_salt(self, scope: CacheScope, parts: Sequence[int | str]) -> str:
        """Salt that separates one layout's composed blocks, in the engine's prefix cache and in tiers.

        It is the same in every process with the same engine. Clients can't choose it: a salt of theirs is a part of the
        scope. SHA-256, since nothing compares what it stands for.
        """
        fields = [b"layout", str(scope).encode(), *(str(part).encode() for part in parts)]
        return "tessera-" + hashlib.sha256(self._framed(fields)).hexdigest()

    def adapted_salt(self, scope: CacheScope, num_before: int) -> str | None:
        """Salt of blocks with ``num_before`` tokens of the plain model, and a chunk of the adapter's behind them.

        ``None`` if chunks of the scope are computed without the server's adapter: a client's own runs alone.
        """
        is_adapted = self._has_adapter and not scope.adapter
        return self.layout_salt(scope, ["adapted", num_before]) if is_adapted else None

    def _framed(self, fields: Sequence[bytes]) -> bytes:
        return b"".join(map(framed, (self._fingerprint, *fields)))


def framed(field: bytes) -> bytes:
    """The field behind its length, so that different lists have different bytes."""
    return len(field).to_bytes(8, "little") + field
