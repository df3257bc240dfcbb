# SPDX-License-Identifier: Apache-2.0
"""Preview of a request: its segments in the chunk cache, without running it."""

from dataclasses import asdict, replace
from typing import Any

from cache.errors import FullAttentionError
from cache.positions.layout import ChunkedPrompt
from cache.segments.index import Lookup, PromptSegment
from engine_ext.chunks.cache_off import CacheOff
from engine_ext.chunks.chunk_cache import ChunkCache
from engine_ext.client.request import ResolvedRequest
from engine_ext.client.segments import PlacedSegments, place


def preview(cache: ChunkCache | CacheOff, request: ResolvedRequest) -> dict[str, Any]:
    """The JSON of ``POST /v1/rag/plan``.

    ``tokens.missing`` counts tokens that fill requests would save; ``chunks[].status`` is ``hit``, ``filling`` (another
    request computes it now) or ``missing``.
    """
    if isinstance(cache, CacheOff) or request.prompt is None:
        return {"mode": "full", "reason": request.refusal[1] if request.refusal else cache.reason}
    prompt, options = request.prompt, request.options
    placed = place(cache, replace(request, refusal=None))  # a refused request is described, too
    reason = _full_reason(request, placed)
    return {
        "mode": "full" if reason else "chunked",
        "reason": reason,
        "position_strategy": options.position_strategy.value,
        "scope": options.scope,
        "decision": asdict(options.decision) if options.decision else None,
        "recompute": options.recompute,
        "reread": options.reread,
        "tokens": _tokens(prompt, placed.found),
        "pages": {"needed": placed.found.pages_needed + placed.most_windows, "free": cache.manager.pool.num_free},
        "chunks": _chunks(prompt, placed.found),
    }


def _full_reason(request: ResolvedRequest, placed: PlacedSegments) -> str | None:
    try:
        request.chunked()
        placed.cache.usable()
        placed.fit()
    except FullAttentionError as error:
        return str(error)
    return None


def _tokens(prompt: ChunkedPrompt, found: Lookup) -> dict[str, int]:
    cached = [segment.num_tokens for segment in found.segments if segment.entry is not None]
    missing = {segment.key: segment.num_tokens for segment in found.segments if segment.entry is None}
    return {
        "prompt": len(prompt.token_ids),
        "cached": sum(cached),
        "missing": sum(missing.values()),
        "question": len(prompt.question),
    }


def _chunks(prompt: ChunkedPrompt, found: Lookup) -> list[dict[str, Any]]:
    segments = [segment for segment in found.segments if not segment.is_system]
    return [
        {**chunk.label, "key": str(segment.key), "tokens": chunk.num_tokens, "status": _status(segment)}
        for chunk, segment in zip(prompt.chunks, segments, strict=True)
        if not chunk.is_text
    ]


def _status(segment: PromptSegment) -> str:
    if segment.entry is None:
        return "missing"
    return "hit" if segment.is_loadable else "filling"
