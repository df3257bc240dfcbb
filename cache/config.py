# SPDX-License-Identifier: Apache-2.0
"""Configuration of one chunk cache."""

from dataclasses import dataclass
from typing import Literal

from cache.eviction.policies import EvictionPolicyName

ChunkCacheUse = Literal["on", "off", "require"]
"""``on``: requests run in full attention where chunks can't be reused; ``require``: no start then."""


@dataclass(frozen=True, slots=True)
class ChunkCacheConfig:
    """Static configuration of a :class:`~cache.manager.ChunkCacheManager`.

    The pool has ``num_pages`` pages of ``page_tokens`` tokens each; their memory belongs to the engine. ``page_bytes``
    (on all workers together) is for statistics and costs. ``fingerprint`` identifies everything that changes a token's
    KV besides the tokens before it (model, dtype, RoPE parameters), so that keys of two engines never
    match. ``block_order`` names the memory order of the engine's own blocks, which other engines may read. ``adapter``
    is the digest of the adapter that runs where chunks are computed, if there is one.
    """

    num_pages: int
    page_tokens: int
    fingerprint: str
    num_workers: int = 1
    eviction: EvictionPolicyName = "s3fifo"
    page_bytes: int = 0
    block_order: str = ""
    adapter: str = ""

    def __post_init__(self) -> None:
        if self.num_pages < 1:
            raise ValueError(f"num_pages must be at least 1, got {self.num_pages}")
        if self.page_tokens < 1:
            raise ValueError(f"page_tokens must be at least 1, got {self.page_tokens}")

    @property
    def peer_fingerprint(self) -> str:
        """Identifies engines that divide the same KV among as many workers, which give each other their parts."""
        return f"{self.fingerprint}-{self.num_workers}"

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.page_tokens)
