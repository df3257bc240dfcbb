# SPDX-License-Identifier: Apache-2.0
"""Preview of a request: its segments in the chunk cache, without running it."""

from dataclasses import asdict
from typing import Any

from cache.positions.layout import ChunkedPrompt
from cache.segments.index import Lookup, PromptSegment
from engine_ext.chunks.cache_off import CacheOff
from engine_ext.chunks.chunk_cache import ChunkCache
from engine_ext.chunks.links import link_places
from engine_ext.client.admission import admit
from engine_ext.client.resolved import ResolvedRequest
from engine_ext.wire.request import FullAttentionError


def preview(cache: ChunkCache | CacheOff, request: ResolvedRequest) -> dict[str, Any]:
    """The JSON of ``POST /v1/rag/plan``.

    ``tokens.missing`` counts tokens that fill requests would save; ``chunks[].status`` is ``hit``, ``filling`` (another
    request computes it now) or ``missing``.
    """
    reason = _full_reason(cache, request)
    if isinstance(cache, CacheOff) or request.prompt is None:
        return {"mode": "full", "reason": reason}
    prompt, options = request.prompt, request.options
    found = cache.look_up(prompt, request.scope)
    links = link_places(cache.layout(prompt, options.position_strategy), options.link_tokens)
    num_link_pages = sum(cache.config.pages_for(at.length) for at in links)
    return {
        "mode": "full" if reason else "chunked",
        "reason": reason,
        "position_strategy": options.position_strategy.value,
        "scope": options.scope,
        "decision": asdict(options.decision) if options.decision else None,
        "link_tokens": options.link_tokens,
        "tokens": _tokens(prompt, found),
        "pages": {"needed": found.pages_needed + num_link_pages, "free": cache.num_free_pages},
        "chunks": _chunks(prompt, found),
    }


def _full_reason(cache: ChunkCache | CacheOff, request: ResolvedRequest) -> str | None:
    try:
        admit(cache, request)
    except FullAttentionError as error:
        return str(error)
    return None


def _tokens(prompt: ChunkedPrompt, found: Lookup) -> dict[str, int]:
    cached = [wanted.num_tokens for wanted in found.segments if wanted.entry is not None]
    missing = {wanted.key: wanted.num_tokens for wanted in found.segments if wanted.entry is None}
    return {
        "prompt": len(prompt.token_ids),
        "cached": sum(cached),
        "missing": sum(missing.values()),
        "question": len(prompt.question),
    }


def _chunks(prompt: ChunkedPrompt, found: Lookup) -> list[dict[str, Any]]:
    wanted = [w for w in found.segments if not w.is_system]
    return [
        {**chunk.label, "key": str(w.key), "tokens": chunk.num_tokens, "status": _status(w)}
        for chunk, w in zip(prompt.chunks, wanted, strict=True)
    ]


def _status(wanted: PromptSegment) -> str:
    if wanted.entry is None:
        return "missing"
    return "hit" if wanted.is_loadable else "filling"
