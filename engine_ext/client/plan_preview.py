# SPDX-License-Identifier: Apache-2.0
"""What a request would find in the chunk cache, without running it."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from cache.hashing import CacheScope
from cache.index import EntryState
from cache.layout import ChunkedPrompt
from cache.manager import ChunkCacheManager, Lookup, Wanted
from engine_ext.chunks.links import link_placements
from engine_ext.wire.request import CacheOptions

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

    from engine_ext.client.engine import ChunkEngine


def preview(
    engine: "ChunkEngine",
    options: CacheOptions,
    prompt: ChunkedPrompt | None,
    scope: CacheScope,
    *,
    wants_prompt_logprobs: bool = False,
    lora_request: "LoRARequest | None" = None,
) -> dict[str, Any]:
    """The JSON of ``POST /v1/rag/plan``.

    ``tokens.missing`` is what fill requests would have to save; ``chunks[].status`` is ``hit``, ``filling`` (another
    request computes it now) or ``missing``.
    """
    reason = _full_reason(engine, options, prompt, wants_prompt_logprobs) or engine.adapters.reason(lora_request)
    if engine.manager is None or prompt is None:
        return {"mode": "full", "reason": reason}
    found = engine.manager.look_up(prompt, scope)
    placements = link_placements(engine.layout(prompt, options.position_strategy), options.link_tokens)
    num_link_pages = sum(engine.manager.config.pages_for(at.length) for at in placements)
    reason = reason or _does_not_fit(engine.manager, found, num_link_pages)
    missing = {w.key: w.identity.num_tokens for w in found.segments if w.entry is None}
    return {
        "mode": "full" if reason else "chunked",
        "reason": reason,
        "position_strategy": options.position_strategy.value,
        "scope": options.scope,
        "decision": asdict(options.decision) if options.decision else None,
        "link_tokens": options.link_tokens,
        "tokens": {
            "prompt": len(prompt.token_ids),
            "cached": sum(w.identity.num_tokens for w in found.segments if w.entry is not None),
            "missing": sum(missing.values()),
            "question": len(prompt.question),
        },
        "pages": {"needed": found.pages_needed + num_link_pages, "free": engine.manager.pool.num_free},
        "chunks": _chunks(prompt, found),
    }


def _full_reason(
    engine: "ChunkEngine", options: CacheOptions, prompt: ChunkedPrompt | None, wants_prompt_logprobs: bool
) -> str | None:
    """What :class:`~engine_ext.client.run.ChunkedRun` would find first."""
    if prompt is None:
        return "the request has no chunks"
    if options.why_full:
        return options.why_full
    if wants_prompt_logprobs:
        return "prompt_logprobs need every prompt token computed"
    if engine.manager is None or engine.disabled_reason:
        return engine.disabled_reason or "the chunk cache is off"
    return None


def _does_not_fit(manager: ChunkCacheManager, found: Lookup, num_link_pages: int) -> str | None:
    distinct = {wanted.key: wanted.identity.num_tokens for wanted in found.segments}
    pages, total = sum(map(manager.config.pages_for, distinct.values())) + num_link_pages, manager.config.num_pages
    if pages > total:
        return f"the segments need {pages} pages; the pool has {total}"
    needed = found.pages_needed + num_link_pages
    free = manager.available_pages(sparing={wanted.entry for wanted in found.segments if wanted.entry is not None})
    if needed > free:
        return f"the segments need {needed} more pages; {free} of {total} can be freed now"
    return None


def _chunks(prompt: ChunkedPrompt, found: Lookup) -> list[dict[str, Any]]:
    wanted = [w for w in found.segments if not w.is_system]
    return [
        {**chunk.label, "key": str(w.key), "tokens": chunk.num_tokens, "status": _status(w)}
        for chunk, w in zip(prompt.chunks, wanted, strict=True)
    ]


def _status(wanted: Wanted) -> str:
    if wanted.entry is None:
        return "missing"
    return "hit" if wanted.entry.state is EntryState.READY else "filling"
