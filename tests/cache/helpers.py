# SPDX-License-Identifier: Apache-2.0
"""Small prompts, managers and entries, and what registries say of them."""

from collections.abc import Callable, Sequence
from typing import Any

from cache.config import ChunkCacheConfig
from cache.eviction.policies import EvictionPolicyName
from cache.lease import Lease
from cache.manager import ChunkCacheManager
from cache.positions.layout import Chunk, ChunkedPrompt, PositionReindexer, PositionStrategy, pack
from cache.segments.hashing import CacheScope, ChunkHash, ChunkHasher
from cache.segments.holdings import DocumentKey, Holding, Tier
from cache.segments.index import ChunkKVCache, SegmentIdentity, now
from replicas.registry import Replica

PAGE_TOKENS = 4
SCOPE = CacheScope()
SYSTEM = (1, 2, 3)


def tokens(first: int, length: int) -> tuple[int, ...]:
    """``length`` tokens, distinct for each ``first`` (a multiple of 100)."""
    return tuple(range(first, first + length))


class Clock:
    """A clock that advances on demand."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def make_prompt(
    *chunks: Sequence[int], system: Sequence[int] = SYSTEM, opening: Sequence[int] | None = None
) -> ChunkedPrompt:
    return ChunkedPrompt(
        tuple(system),
        tuple(Chunk(pack(tuple(chunk))) for chunk in chunks),
        (9, 9),
        None if opening is None else tuple(opening),
    )


def make_manager(
    num_pages: int = 12,
    hasher: ChunkHasher | None = None,
    clock: Callable[[], float] = now,
    eviction: EvictionPolicyName = "lru",
    **listeners: Any,
) -> ChunkCacheManager:
    config = ChunkCacheConfig(num_pages, PAGE_TOKENS, "engine", eviction=eviction)
    manager = ChunkCacheManager(config, clock, **listeners)
    if hasher is not None:
        manager.hasher = hasher
    return manager


def acquire(
    manager: ChunkCacheManager,
    *chunks: Sequence[int],
    system: Sequence[int] = SYSTEM,
    scope: CacheScope = SCOPE,
    strategy: PositionStrategy = PositionStrategy.SHARED,
    opening: Sequence[int] | None = None,
) -> Lease:
    """Leases every segment before the question; raises :class:`CapacityError`."""
    manager.expire()
    prompt = make_prompt(*chunks, system=system, opening=opening)
    fit = manager.fit(manager.look_up(prompt, scope), scope.owner)
    return manager.lease(fit, PositionReindexer().layout(prompt, strategy))


def fill(manager: ChunkCacheManager, *chunks: Sequence[int], **kwargs) -> None:
    """Runs a request from acquisition through fills to release."""
    lease = acquire(manager, *chunks, **kwargs)
    for job in lease.fills:
        manager.fill_succeeded(job)
    manager.release(lease)


def find(manager: ChunkCacheManager, chunk: Sequence[int]) -> ChunkKVCache | None:
    """The entry of ``chunk``, if the index holds one; it is no use."""
    return next((entry for entry in manager.index if entry.identity.token_ids == tuple(chunk)), None)


class ChunkCollidingHasher(ChunkHasher):
    """Every chunk gets the same key; system segments get their own."""

    def chunk_keys(self, scope, prefix, chunks):
        return [ChunkHash(b"same") for _ in chunks]


class CollidingHasher(ChunkCollidingHasher):
    """Every segment gets the same key."""

    def system_key(self, scope, tokens):
        return ChunkHash(b"same")


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
