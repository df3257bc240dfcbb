# SPDX-License-Identifier: Apache-2.0
"""From a sparse request to the chunks that its question attends to most; only these are loaded, and hold blocks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cache.segments.index import ChunkKVCache
from cache.sparse import choose
from engine_ext.chunks.cache_off import CacheOff
from engine_ext.chunks.chunk_cache import ChunkCache, FillResult
from engine_ext.chunks.source import SourceResult
from engine_ext.client.attention import attention_to_chunks
from engine_ext.client.call import EngineCall, Stages
from engine_ext.client.request import ResolvedRequest
from engine_ext.client.segments import filled_segments


@dataclass(frozen=True, slots=True)
class Selection:
    """A request with the chunks that it keeps.

    ``attention`` is that to each token of all chunks, if it was needed. ``fills`` are the results of the fill requests
    for chunks that were missing, ``origins`` where all came from.
    """

    request: ResolvedRequest
    attention: Sequence[Sequence[float]] = ()
    fills: Sequence[FillResult] = ()
    origins: Mapping[ChunkKVCache, SourceResult] = field(default_factory=dict)

    @property
    def kept(self) -> Sequence[int] | None:
        """Indices of the chunks that are kept; ``None``: all of them, unmeasured."""
        return self.request.kept

    def prompt_of(self, call: EngineCall) -> EngineCall:
        """The call with the tokens that are kept."""
        return call if self.kept is None else call.with_tokens(self.request.chunked().token_ids)


async def selected(
    cache: ChunkCache | CacheOff, request: ResolvedRequest, call: EngineCall, stages: Stages
) -> Selection:
    """Choose the chunks of a sparse request; raises :class:`FullAttentionError`."""
    sparse = request.options.sparse
    assert sparse is not None
    prompt = request.whole()
    lengths = [prompt.chunks[index].num_tokens for index in prompt.documents]
    if len(lengths) == 1 or sum(lengths) <= sparse.budget(sum(lengths)):
        return Selection(request)
    cache.usable().check_attention()
    async with filled_segments(cache, request, call, stages) as filled:
        with stages.stage("select"):
            attention = await attention_to_chunks(filled, call)
        filled.name_documents()
        paid = [sum(attention[index]) for index in prompt.documents]
        chosen = {prompt.documents[number] for number in choose(paid, lengths, sparse)}
        kept = [index for index, chunk in enumerate(prompt.chunks) if chunk.is_text or index in chosen]
        origins = {each.entry: SourceResult(each.status) for each in filled.lease.segments}
        keeping = request.keeping(kept, closes_gaps=sparse.closes_gaps)
        return Selection(keeping, attention, filled.fills, {**origins, **filled.sources()})
