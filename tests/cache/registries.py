# SPDX-License-Identifier: Apache-2.0
"""Helpers for tests of the registry."""

from cache.positions.layout import pack
from cache.segments.hashing import CacheScope, ChunkHash
from cache.segments.holdings import DocumentKey, Holding, Tier
from cache.segments.index import ChunkKVCache, SegmentIdentity
from replicas.registry import Replica


def key(number):
    return DocumentKey(number.to_bytes(16, "big"))


def replica(number, **fields):
    given = {"id": f"{number:012x}", "name": f"replica-{number}", "url": f"http://127.0.0.1:{9000 + number}"}
    return Replica(**{**given, "models": ("m",), "fingerprint": "f", **fields})


def holding(tokens=100):
    return Holding(Tier.DEVICE, tokens)


def entry_of(number, tokens=10):
    """A cached chunk."""
    identity = SegmentIdentity(CacheScope(), b"", pack(tuple(range(tokens))))
    digest = ChunkHash(b"chunk %d" % number)
    return ChunkKVCache(digest, identity, list(range(3)), number, 0.0, 0.0, is_system=False)
