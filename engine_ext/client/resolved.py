# SPDX-License-Identifier: Apache-2.0
"""A request over chunks with everything decided about it: made once, then passed on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from vllm.sampling_params import SamplingParams

from cache.lease import Lease
from cache.positions.layout import ChunkedPrompt, Layout
from cache.segments.hashing import CacheScope, ChunkHasher
from cache.segments.holdings import DocumentKey
from cache.segments.index import ChunkKVCache
from cache.sparse import Sparse
from engine_ext.chunks.chunk_cache import ChunkCache
from engine_ext.client.adapters import Adapters
from engine_ext.wire.caller import DEFAULT_NAMESPACE
from engine_ext.wire.plan import Composition
from engine_ext.wire.request import CacheMode, CacheOptions, ChunkedRequest, FullAttentionError

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest


@dataclass(frozen=True, slots=True)
class ResolvedRequest:
    """One request: its segments (``None`` without chunks), options, scope, adapter and documents.

    ``refusal`` is the kind and the text of the reason for full attention that needs no look at the cache. ``kept`` has
    the indices of the chunks that the answer may use; ``None``: all of them. ``closes_gaps``: they are placed as if
    there were no others.
    """

    prompt: ChunkedPrompt | None
    options: CacheOptions
    scope: CacheScope
    lora_request: "LoRARequest | None" = None
    document_keys: tuple[DocumentKey, ...] = ()
    refusal: tuple[str, str] | None = None
    kept: tuple[int, ...] | None = None
    closes_gaps: bool = False

    def keeping(self, kept: Sequence[int], *, closes_gaps: bool = False) -> "ResolvedRequest":
        """The request with these chunks only."""
        return replace(self, kept=tuple(kept), closes_gaps=closes_gaps)

    @property
    def mode(self) -> CacheMode:
        """The mode that the client asked for."""
        return self.options.mode

    @property
    def sparse(self) -> Sparse | None:
        """The budget for the request's chunks, if it has one."""
        return self.options.sparse

    def chunked(self) -> ChunkedPrompt:
        """The segments that are kept; raises :class:`FullAttentionError` if the request can't use the cache."""
        prompt = self.whole()
        return prompt if self.kept is None else prompt.keeping(self.kept)

    def whole(self) -> ChunkedPrompt:
        """All segments; raises :class:`FullAttentionError` if the request can't use the cache."""
        if self.refusal is not None:
            raise FullAttentionError(*self.refusal)
        if self.prompt is None:
            raise FullAttentionError("no chunks", "the request has no chunks")
        return self.prompt

    def layout(self, cache: ChunkCache) -> Layout:
        """The places of the segments that are kept; raises :class:`FullAttentionError`."""
        whole, strategy = self.whole(), self.options.position_strategy
        if self.kept is None:
            return cache.layout(whole, strategy)
        if self.closes_gaps:
            prompt = self.chunked()
            left_out = whole.num_context_tokens - prompt.num_context_tokens
            return replace(cache.layout(prompt, strategy), num_left_out=left_out)
        return cache.layout(whole, strategy).keeping(self.kept)

    def plain_salt(self, hasher: ChunkHasher) -> str | None:
        """Cache salt of the request's plain causal KV."""
        return plain_salt(hasher, self.scope)

    def composed_salt(self, hasher: ChunkHasher, layout: Layout, *more: int | str) -> str:
        """Cache salt of the KV that the request composes in ``layout``."""
        options, opening = self.options, self.prompt.opening if self.prompt is not None else None
        parts = [*layout.salt_parts(), options.scope, *(opening or ()), *more]
        if options.link_tokens:
            parts += ["links", options.link_context, options.link_tokens]
        return hasher.layout_salt(self.scope, parts)

    def composition(self, hasher: ChunkHasher, layout: Layout) -> Composition | None:
        """The blocks that the request shares in ``layout``; ``None`` if its chunks are not in place."""
        if layout.placement != "in-place":
            return None
        lengths = (layout.system.length, *(chunk.length for chunk in layout.chunks))
        return Composition(lengths, self.plain_salt(hasher))

    def documents(self, lease: Lease) -> Mapping[ChunkKVCache, DocumentKey]:
        """The registry's keys of the leased segments; the system segment has a key of its own."""
        keys = self.document_keys
        if not keys or self.prompt is None:
            return {}
        documents = {s.entry: keys[c.document] for c, s in zip(self.chunked().chunks, lease.chunks, strict=True)}
        if lease.system is not None:
            entry = lease.system.entry
            documents[entry] = DocumentKey(entry.key.digest)
        return documents


def resolve(
    request: ChunkedRequest,
    adapters: Adapters,
    params: SamplingParams,
    lora_request: "LoRARequest | None" = None,
) -> ResolvedRequest:
    """Decides everything about ``request`` that needs no look at the cache."""
    adapter = adapters.name(lora_request)
    options = request.options(adapter)
    return ResolvedRequest(
        request.prompt,
        options,
        CacheScope(options.namespace, adapter),
        lora_request,
        request.document_keys,
        _refusal(request, options, params, adapters.reason(lora_request)),
    )


def plain_salt(hasher: ChunkHasher, scope: CacheScope) -> str | None:
    """Cache salt of plain causal KV; ``None`` in the default namespace.

    vLLM tells adapters apart by name only, so KV behind an adapter has a salt of its own.
    """
    return None if scope == CacheScope(DEFAULT_NAMESPACE) else scope_salt(hasher, scope)


def scope_salt(hasher: ChunkHasher, scope: CacheScope) -> str:
    """The name of a scope's plain causal KV, the default namespace's too."""
    return hasher.layout_salt(scope, ["plain"])


def _refusal(
    request: ChunkedRequest, options: CacheOptions, params: SamplingParams, adapter_reason: str | None
) -> tuple[str, str] | None:
    checks: list[tuple[Any, str, str | None]] = [
        (request.prompt is None, "no chunks", "the request has no chunks"),
        (options.why_full, "profile" if options.decision else "asked for", options.why_full),
        (
            params.prompt_logprobs is not None,
            "prompt_logprobs",
            "prompt_logprobs need every prompt token computed",
        ),
        (params.skip_reading_prefix_cache, "asked for", "the request asks not to read caches"),
        (adapter_reason, "adapter", adapter_reason),
    ]
    return next(((kind, str(reason)) for holds, kind, reason in checks if holds), None)
