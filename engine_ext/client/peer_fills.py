# SPDX-License-Identifier: Apache-2.0
"""Chunks computed for replicas that decode."""

from uuid import uuid4

from vllm.v1.engine.async_llm import AsyncLLM

from cache.errors import CapacityError, FullAttentionError
from cache.positions.layout import layout_as_computed
from engine_ext.chunks.cache_off import CacheOff
from engine_ext.chunks.chunk_cache import ChunkCache
from engine_ext.client.position_limit import trained_positions
from engine_ext.client.request import plain_salt
from engine_ext.wire.peer_fill import PeerFill


async def fill_for_peer(llm: AsyncLLM, cache: ChunkCache | CacheOff, fill: PeerFill) -> None:
    """Computes the segments unless the pool has them; raises :class:`FullAttentionError`.

    The registry is not asked who has them: the replica that asks has done so, and may be the one that is named.
    """
    usable, prompt = cache.usable(), fill.prompt()
    limit = trained_positions(llm.model_config)
    if len(prompt.token_ids) > limit:
        raise FullAttentionError("too long", f"{len(prompt.token_ids)} tokens exceed the context length of {limit}")
    if usable.is_crowded():
        raise FullAttentionError("crowded", "too many chunks wait to be computed")
    manager = usable.manager
    manager.expire()
    try:
        fit = manager.fit(manager.look_up(prompt, fill.scope), fill.scope.owner)
    except CapacityError as error:
        raise FullAttentionError("capacity", str(error)) from error
    lease = manager.lease(fit, layout_as_computed(prompt))
    try:
        tasks = usable.fills.start(lease, f"peer-{uuid4().hex}", plain_salt(usable.hasher, fill.scope), {})
        await usable.fills.wait(lease, tasks)
        segments = zip(lease.segments[-len(fill.segments) :], fill.segments, strict=True)
        usable.name({leased.entry: each.document for leased, each in segments if each.document is not None})
    finally:
        usable.release(lease)
