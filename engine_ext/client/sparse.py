# SPDX-License-Identifier: Apache-2.0
"""From a sparse request to the chunks that its question attends to most.

A probe, the same request without any chunk, gives the question's queries; the workers score all chunks with them
(:mod:`engine_ext.core.attention.probes`). Only the chunks kept are loaded then, and hold blocks.
"""

import itertools
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Final

from cache.errors import FullAttentionError
from cache.segments.index import ChunkKVCache
from cache.sparse import choose
from engine_ext.chunks.cache_off import CacheOff
from engine_ext.chunks.chunk_cache import ChunkCache, FillResult
from engine_ext.chunks.prefill import run_plan
from engine_ext.chunks.representations import Representations
from engine_ext.chunks.source import SourceResult
from engine_ext.client.call import EngineCall, Stages, is_error
from engine_ext.client.request import ResolvedRequest
from engine_ext.client.segments import FilledSegments, filled_segments
from engine_ext.wire.plan import Probe, TransferPlan

_numbers: Final = itertools.count()


@dataclass(frozen=True, slots=True)
class Selection:
    """A request with the chunks that it keeps.

    ``shares`` are all chunks' shares of the question's attention, if they were needed. ``fills`` are the results of the
    fill requests for chunks that could not be scored before, ``origins`` where those chunks came from.
    """

    request: ResolvedRequest
    shares: Sequence[float] = ()
    fills: Sequence[FillResult] = ()
    origins: Mapping[ChunkKVCache, SourceResult] = field(default_factory=dict)

    @property
    def kept(self) -> Sequence[int] | None:
        """Indices of the chunks that are kept; ``None``: all of them, unscored."""
        return self.request.kept

    def prompt_of(self, call: EngineCall) -> EngineCall:
        """The call with the tokens that are kept."""
        return call if self.kept is None else call.with_tokens(self.request.chunked().token_ids)


async def selected(
    cache: ChunkCache | CacheOff, request: ResolvedRequest, call: EngineCall, stages: Stages
) -> Selection:
    """Chooses the chunks of a sparse request; raises :class:`FullAttentionError`."""
    sparse = request.options.sparse
    assert sparse is not None
    lengths = [chunk.num_tokens for chunk in request.whole().chunks]
    if len(lengths) == 1 or sum(lengths) <= sparse.budget(sum(lengths)):
        return Selection(request)
    if request.options.link_tokens:
        raise FullAttentionError("sparse", "link tokens see all chunks, so none can be left out")
    usable = cache.usable()
    with stages.stage("select"):
        async with (
            _scorable(usable, request, call, stages) as (numbers, selection),
            filled_segments(cache, request.keeping(()), call, stages) as system,
        ):
            shares = await _shares(system, request, numbers, call)
        kept = request.keeping(choose(shares, lengths, sparse), closes_gaps=sparse.closes_gaps)
        return replace(selection, request=kept, shares=shares)


@asynccontextmanager
async def _scorable(
    cache: ChunkCache, request: ResolvedRequest, call: EngineCall, stages: Stages
) -> AsyncIterator[tuple[Sequence[int], Selection]]:
    """Lets the workers score all chunks within the context; yields the chunks' numbers there.

    Computes or loads chunks that can't be scored yet.
    """
    representations = _representations(cache)
    known = _numbers_of(cache, request)
    with representations.using(number for number in known if number is not None):
        unknown = [index for index, number in enumerate(known) if number is None]
        selection = await _represented(cache, request, unknown, call, stages)
        numbers = [number for number in _numbers_of(cache, request) if number is not None]
        if len(numbers) < len(request.whole().chunks):
            raise FullAttentionError("sparse", "a chunk can't be scored: it was dropped meanwhile")
        with representations.using(numbers):
            yield numbers, selection


async def _represented(
    cache: ChunkCache, request: ResolvedRequest, unknown: Sequence[int], call: EngineCall, stages: Stages
) -> Selection:
    """Has the workers represent chunks that are ``unknown`` to them, by index."""
    if not unknown:
        return Selection(request)
    async with filled_segments(cache, request.keeping(unknown), call, stages) as filled:
        await cache.represent(filled.lease)
        filled.name_documents()
        origins = {each.entry: SourceResult(each.status) for each in filled.lease.segments}
        return Selection(request, fills=filled.fills, origins={**origins, **filled.sources()})


async def _shares(
    system: FilledSegments, request: ResolvedRequest, numbers: Sequence[int], call: EngineCall
) -> list[float]:
    """Each chunk's share of the question's attention to all of them; ``numbers`` are theirs in the workers."""
    prompt, chunks = request.whole(), request.layout(system.cache.reindexer).chunks
    left_out = sum(chunk.length for chunk in chunks)
    deltas = (chunk.turned_back(left_out).delta for chunk in chunks)
    probe = Probe(next(_numbers), len(prompt.system), tuple(zip(numbers, deltas, strict=True)))
    tokens = [*prompt.system, *prompt.question]
    plan = replace(TransferPlan.for_answer(system.lease, attends=system.attends), probe=probe)
    # With a salt of its own: all of the question's queries are needed, and nobody else's blocks are behind it.
    salt = secrets.token_hex(16)
    try:
        output = await run_plan(call.llm, tokens, plan, f"{call.request_id}-probe", salt, **call.kwargs)
    finally:
        by_worker = await call.take_scores(probe.id)
    if is_error(output):
        await system.forget_refused(call.request_id)
        raise FullAttentionError("load refused", "a worker refused to load the system segment")
    known = [scores for scores in by_worker if scores is not None]
    if len(known) < len(by_worker):
        raise FullAttentionError("sparse", "a chunk can't be scored: it was dropped meanwhile")
    sums = [sum(scores) for scores in zip(*known, strict=True)]
    return [score / sum(sums) for score in sums]


def _numbers_of(cache: ChunkCache, request: ResolvedRequest) -> list[int | None]:
    """Numbers of all chunks in the workers; ``None`` for chunks that can't be scored."""
    found = cache.manager.look_up(request.whole(), request.scope)
    return [_representations(cache).number(segment) for segment in found.segments if not segment.is_system]


def _representations(cache: ChunkCache) -> Representations:
    if cache.representations is None:
        raise FullAttentionError("sparse", "chunks can be left out on servers with --chunk-sparse-budget only")
    return cache.representations
