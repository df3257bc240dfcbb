# SPDX-License-Identifier: Apache-2.0
"""A request with chunks: who calls, with which options, and what is decided before anybody looks into the cache."""

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final, Literal

from cache.errors import FullAttentionError
from cache.lease import Lease
from cache.positions.layout import ChunkedPrompt, Layout, PositionReindexer, PositionStrategy
from cache.report import Found, FoundDocument, ScopeName
from cache.segments.hashing import CacheScope, ChunkHasher
from cache.segments.holdings import DocumentKey
from cache.segments.index import ChunkKVCache
from cache.sparse import Sparse
from cache.windows import Window

if TYPE_CHECKING:  # the router reads requests, too, and has no engine
    from vllm.lora.request import LoRARequest
    from vllm.outputs import RequestOutput
    from vllm.sampling_params import SamplingParams

    from engine_ext.client.adapters import Adapters
    from engine_ext.wire.plan import Composition

REQUEST_KEY: Final = "tessera_request"
"""Key under which a rendered prompt carries its :class:`ChunkedRequest` to :class:`ChunkEngine`."""
DEFAULT_NAMESPACE: Final = "default"

Outputs = AsyncGenerator["RequestOutput", None]
CacheMode = Literal["auto", "chunked", "full"]


class LimitsError(Exception):
    """The caller's limits allow no more."""


class NamespaceRefusedError(ValueError):
    """A request names a namespace that its API key doesn't open."""


class Spending:
    """Takes what an HTTP request needs of its tenant's limits; here, of none."""

    def begin(self, num_tokens: int, num_answers: int) -> None:
        """Count tokens before they are computed, and answers until they :meth:`end`.

        Raises :class:`LimitsError` if other requests have left none, before anything is computed.
        """

    def charge(self, num_tokens: int) -> None:
        """Count tokens of an answer."""

    def end(self, num_answers: int) -> None:
        """Count answers no longer."""


@dataclass(frozen=True, slots=True)
class Caller:
    """A tenant, for the caches.

    ``namespace`` is its own, ``others`` are further namespaces that its requests may name (``*``: any).
    """

    namespace: str
    others: frozenset[str] = frozenset()
    is_admin: bool = False
    spending: Spending = field(default_factory=Spending)

    def may_use(self, namespace: str) -> bool:
        """Whether its requests may read and fill this namespace."""
        return namespace == self.namespace or not self.others.isdisjoint({namespace, "*"})


CALLER: ContextVar[Caller | None] = ContextVar("caller", default=None)
"""``None`` if the server requires no keys."""
IS_PEER: ContextVar[bool] = ContextVar("is_peer", default=False)
"""Whether the request carries the replicas' secret, so that it may name KV of other requests."""


class Progress:
    """How far a request has come. ``is_servers``: what fails from now on is the server's fault."""

    is_servers = False
    num_logprobs = num_logprobs_at_once = 0


PROGRESS: ContextVar[Progress | None] = ContextVar("progress", default=None)
"""Of the HTTP request, if its endpoint wants to know."""


def owner() -> str | None:
    """Who takes turns with others for the work of this request; ``None`` is nobody in particular."""
    caller = CALLER.get()
    return caller.namespace if caller is not None else None


def own_namespace(wanted: str | None) -> str:
    """The namespace of a request that names ``wanted``, or none; raises :class:`NamespaceRefusedError`."""
    caller = CALLER.get()
    if caller is None:
        return wanted or DEFAULT_NAMESPACE
    if wanted is not None and not caller.may_use(wanted):
        raise NamespaceRefusedError(f"this API key does not open the namespace {wanted!r}")
    return wanted or caller.namespace


async def charged(outputs: Outputs, spending: Spending, num_answers: int, *, are_deltas: bool) -> Outputs:
    """Yield the outputs of answers that have begun, and charge for them as they grow.

    ``are_deltas``: each output has the new tokens only (vLLM's ``RequestOutputKind.DELTA``), not all so far.
    """
    num_charged = 0
    try:
        async with aclosing(outputs):
            async for output in outputs:
                num_tokens = sum(len(completion.token_ids) for completion in output.outputs)
                spending.charge(num_tokens if are_deltas else num_tokens - num_charged)
                num_charged = num_tokens
                yield output
    finally:
        spending.end(num_answers)


@dataclass(frozen=True, slots=True)
class Decision:
    """The server's choice of mode for a request that names none, and its reason."""

    mode: str
    why: str


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """A client's choices. ``chunked`` is ``auto`` that fails instead of falling back to full attention.

    ``namespace`` includes the client's ``cache_salt`` (:func:`salted_namespace`).

    In scope ``system`` a chunk is computed, and reused, behind the same system segment only; in scope ``isolated`` it
    is computed behind the chat template's constant opening, and reused behind any system segment.

    A share ``recompute`` of the chunks' tokens is computed anew, where the question attends
    (:mod:`engine_ext.client.recompute`); needs the position strategy ``offset``.

    A share ``reread`` of them is written again before the question (:mod:`engine_ext.client.reread`). Of documents
    that were found in a prompt it is computed anew in place.

    ``cite``: the report says which chunks each sentence of the answer rests on (:mod:`engine_ext.client.citations`).

    A ``sparse`` request keeps chunks within a budget only (:mod:`engine_ext.client.sparse`).
    """

    mode: CacheMode = "auto"
    position_strategy: PositionStrategy = PositionStrategy.OFFSET
    scope: ScopeName = "system"
    namespace: str = DEFAULT_NAMESPACE
    explain: bool = False
    cite: bool = False
    recompute: float = 0.0
    reread: float = 0.0
    sparse: Sparse | None = None
    decision: Decision | None = None

    @property
    def why_full(self) -> str | None:
        """The reason for full attention if the mode is ``full``; else ``None``."""
        if self.mode != "full":
            return None
        return self.decision.why if self.decision else "cache.mode is full"


Decide = Callable[[CacheOptions, int, str], CacheOptions]
"""Chooses a request's options from its options, number of chunks and LoRA adapter."""


@dataclass(slots=True, eq=False)
class Ticket:
    """One HTTP request's options on the way in, the JSON of its cache report on the way out.

    ``decide`` is set if the request leaves the server a choice, made once its number of chunks is known. ``chunk_ids``
    and ``document_keys`` have one item per document: the client's id, and the registry's key (empty: the documents are
    not published); ``contexts`` the text that each is computed behind, which is no part of the prompt (empty: none).
    ``retrieved`` is for the report, and so is ``found``: the documents that the server has found in the prompt's own
    text. Those keep their positions, and if the request ``leaves_scope`` open, it gets the one with more cached tokens.
    ``cited`` is the answer's text, if the report has citations of it; they name documents without an id by ``labels``.
    """

    options: CacheOptions
    chunk_ids: tuple[str | None, ...] = ()
    document_keys: tuple[DocumentKey, ...] = ()
    contexts: tuple[str, ...] = ()
    report: dict[str, Any] | None = None
    decide: Decide | None = None
    retrieved: Found | None = None
    found: tuple[FoundDocument, ...] = ()
    leaves_scope: bool = False
    labels: tuple[str, ...] = ()
    cited: str | None = None


@dataclass(frozen=True, slots=True)
class ChunkedRequest:
    """A rendered prompt's segments. ``prompt`` is ``None`` without chunks; ``refusal``: why, beside documents."""

    ticket: Ticket
    prompt: ChunkedPrompt | None
    refusal: tuple[str, str] | None = None


def salted_namespace(namespace: str, cache_salt: str | None) -> str:
    """The namespace of a request's keys: a client's own ``cache_salt`` separates them like another namespace."""
    return f"{namespace}\0{cache_salt}" if cache_salt else namespace


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

    def behind_system(self) -> "ResolvedRequest":
        """The request in scope ``system``."""
        prompt = self.prompt and replace(self.prompt, opening=None)
        return replace(self, prompt=prompt, options=replace(self.options, scope="system"))

    def keeping(self, kept: Sequence[int], *, closes_gaps: bool = False) -> "ResolvedRequest":
        """The request with these chunks only."""
        return replace(self, kept=tuple(kept), closes_gaps=closes_gaps)

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

    def layout(self, reindexer: PositionReindexer) -> Layout:
        """The places of the segments that are kept; raises :class:`FullAttentionError`."""
        whole, strategy = self.whole(), self.options.position_strategy
        if self.kept is None:
            return reindexer.layout(whole, strategy)
        if self.closes_gaps:
            prompt = self.chunked()
            left_out = whole.num_context_tokens - prompt.num_context_tokens
            return replace(reindexer.layout(prompt, strategy), num_left_out=left_out)
        return reindexer.layout(whole, strategy).keeping(self.kept)

    def composed_salt(self, hasher: ChunkHasher, layout: Layout, windows: Sequence[Window] = ()) -> str:
        """Cache salt of the KV that the request composes in ``layout``, with these windows computed anew."""
        prompt = self.chunked()
        parts = [*layout.salt_parts(), self.options.scope, *(prompt.opening or ())]
        for number, chunk in enumerate(prompt.chunks):
            if chunk.context:
                parts += ["context", number, sha256(chunk.context).hexdigest()]
        if windows:
            parts += ["windows", *(number for each in windows for number in (each.start, each.length))]
        return hasher.layout_salt(self.scope, parts)

    def composition(self, hasher: ChunkHasher, layout: Layout) -> "Composition | None":
        """The blocks that the request shares in ``layout``; ``None`` if its chunks are not in place."""
        if layout.placement != "in-place":
            return None
        from engine_ext.wire.plan import Composition

        lengths = (layout.system.length, *(chunk.length for chunk in layout.chunks))
        salt = hasher.adapted_salt(self.scope, layout.system.length) or plain_salt(hasher, self.scope)
        return Composition(lengths, salt)

    def documents(self, lease: Lease) -> Mapping[ChunkKVCache, DocumentKey]:
        """The registry's keys of the leased segments; the system segment has a key of its own."""
        keys = self.document_keys
        if not keys or self.prompt is None:
            return {}
        chunks = zip(self.chunked().chunks, lease.chunks, strict=True)
        documents = {segment.entry: keys[chunk.document] for chunk, segment in chunks if not chunk.is_text}
        if lease.system is not None:
            entry = lease.system.entry
            documents[entry] = DocumentKey(entry.key.digest)
        return documents


def resolve(
    request: ChunkedRequest,
    adapters: "Adapters",
    params: "SamplingParams",
    lora_request: "LoRARequest | None" = None,
) -> ResolvedRequest:
    """Decides everything about ``request`` that needs no look at the cache."""
    ticket, prompt = request.ticket, request.prompt
    adapter, unknown_weights = "", None
    if lora_request is not None:
        adapter, unknown_weights = adapters.name(lora_request), adapters.reason(lora_request)
    options = ticket.options
    if ticket.decide is not None and prompt is not None:
        options = ticket.decide(options, len(prompt.documents), adapter)
        if ticket.found:
            options = replace(options, position_strategy=ticket.options.position_strategy)
    if ticket.found and options.reread:
        # Elsewhere in the prompt, documents would lack the text that stands around them.
        in_place = options.reread if options.position_strategy is PositionStrategy.OFFSET else 0.0
        options = replace(options, reread=0.0, recompute=max(options.recompute, in_place))
    refusal = request.refusal or _refusal(prompt, options, params, unknown_weights)
    return ResolvedRequest(
        prompt, options, CacheScope(options.namespace, adapter), lora_request, ticket.document_keys, refusal
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
    prompt: ChunkedPrompt | None, options: CacheOptions, params: "SamplingParams", adapter_reason: str | None
) -> tuple[str, str] | None:
    checks: list[tuple[Any, str, str | None]] = [
        (prompt is None, "no chunks", "the request has no chunks"),
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
