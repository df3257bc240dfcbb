# SPDX-License-Identifier: Apache-2.0
"""Link tokens: the first tokens of later chunks, recomputed behind all earlier tokens.

A chunk's cached KV knows nothing of the chunks before it, and its first tokens, which draw much of the attention, act
as if each chunk were the prompt's beginning. Computing these few in their real context recovers part of the quality
lost to isolation (LegoLink in EPIC, https://arxiv.org/abs/2410.15332). A *link request* has the prompt up to a chunk's
last link token: all earlier tokens are loaded, and the link tokens' KV is saved to pages of this one request, which
loads them in place of the chunk's first tokens.

With context ``cached``, link tokens see earlier chunks as they are cached, and all link requests go to the engine at
once. With ``chained`` they see earlier chunks with their link tokens, so each waits for the one before it.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.v1.engine.async_llm import AsyncLLM

from cache.errors import FullAttentionError
from cache.lease import FillJob, Lease
from cache.manager import ChunkCacheManager
from cache.positions.layout import ChunkedPrompt, Layout, Place, pack, take
from cache.report import LinkContext
from cache.segments.hashing import CacheScope
from cache.segments.index import SegmentIdentity
from engine_ext.chunks.chunk_cache import FillResult
from engine_ext.chunks.prefill import NotSavedError, run_prefill
from engine_ext.wire.plan import TransferPlan


class LinkError(FullAttentionError):
    """A link request did not save its KV."""

    def __init__(self, message: str) -> None:
        super().__init__("link failed", f"a link request failed: {message}")


def link_places(layout: Layout, num_tokens: int) -> list[Place]:
    """Placements of the first ``num_tokens`` tokens of later chunks, in a layout without overlaps."""
    behind = layout.chunks[1:] if num_tokens else ()
    return [Place(at.start, min(num_tokens, at.length), at.position, 0) for at in behind]


def link_identities(prompt: ChunkedPrompt, places: Sequence[Place], scope: CacheScope) -> list[SegmentIdentity]:
    """Identities of link tokens, each behind all earlier tokens of the prompt."""
    packed = pack(tuple(prompt.token_ids))
    return [SegmentIdentity(scope, take(packed, 0, at.start), take(packed, at.start, at.length)) for at in places]


@dataclass(frozen=True, slots=True)
class LinkRequests:
    """How the link requests of one request are sent.

    ``salt_of`` gives the cache salt of each request's composed KV, by its number. They may attend to the pool.
    """

    name: str
    context: LinkContext
    salt_of: Callable[[int], str]
    generate_kwargs: dict[str, Any]
    attends: bool = False


class Linker:
    """Sends link requests."""

    def __init__(self, llm: AsyncLLM, manager: ChunkCacheManager) -> None:
        self._llm = llm
        self._manager = manager

    async def link(self, lease: Lease, links: Lease, requests: LinkRequests) -> list[FillResult]:
        """Computes ``links`` behind the segments of ``lease``; raises :class:`LinkError`.

        When it returns, whatever happened, all link requests have ended.
        """
        is_chained = requests.context == "chained"
        plan = TransferPlan.for_answer(lease, links if is_chained else None, attends=requests.attends)
        try:
            if is_chained:
                return [await self._send(requests, i, job, plan) for i, job in enumerate(links.fills)]
            async with asyncio.TaskGroup() as group:
                sent = [group.create_task(self._send(requests, i, job, plan)) for i, job in enumerate(links.fills)]
            return [task.result() for task in sent]
        except BaseExceptionGroup as group_error:
            raise group_error.exceptions[0] from None
        finally:
            for job in links.fills:
                if job.is_under_way:
                    self._manager.fill_failed(job, "aborted")

    async def _send(self, requests: LinkRequests, number: int, job: FillJob, plan: TransferPlan) -> FillResult:
        prompt_ids = job.prompt_ids
        (saved,) = TransferPlan.for_fill(job, None).saves
        own = plan.up_to(saved)
        name, salt = f"{requests.name}-link-{number}", requests.salt_of(number)
        try:
            output = await run_prefill(self._llm, prompt_ids, own, name, salt, **requests.generate_kwargs)
        except NotSavedError as error:
            self._manager.fill_failed(job)
            raise LinkError(str(error)) from error
        self._manager.fill_succeeded(job, "linked")
        num_computed = len(prompt_ids) - (output.num_cached_tokens or 0)
        return FillResult(num_computed, min(num_computed, saved.length))
