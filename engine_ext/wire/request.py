# SPDX-License-Identifier: Apache-2.0
"""A request with chunks on its way from the prompt renderer to the engine."""

from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from cache.positions.layout import ChunkedPrompt, PositionStrategy
from cache.report import Found, LinkContext, ScopeName
from cache.segments.holdings import DocumentKey
from cache.sparse import Sparse
from engine_ext.wire.caller import DEFAULT_NAMESPACE

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput

REQUEST_KEY = "tessera_request"
"""Key under which a rendered prompt carries its :class:`ChunkedRequest` to :class:`ChunkEngine`."""

Outputs = AsyncGenerator["RequestOutput", None]

CacheMode = Literal["auto", "chunked", "full"]
MAX_LINK_TOKENS: Final = 1024


class FullAttentionError(Exception):
    """A request can't be served from the chunk cache; the message says why. The client got no output yet.

    ``kind`` is one of a few words, for metrics.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


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

    The first ``link_tokens`` tokens of each chunk but the first are recomputed (:mod:`engine_ext.chunks.links`);
    needs the position strategy ``offset``.

    A ``sparse`` request keeps chunks within a budget only (:mod:`engine_ext.client.run.selection`).
    """

    mode: CacheMode = "auto"
    position_strategy: PositionStrategy = PositionStrategy.OFFSET
    scope: ScopeName = "system"
    namespace: str = DEFAULT_NAMESPACE
    explain: bool = False
    link_tokens: int = 0
    link_context: LinkContext = "chained"
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
    """One HTTP request's options on the way in, its cache report (as JSON) on the way out.

    ``decide`` is set if the request leaves the server a choice, made once its number of chunks is known. ``chunk_ids``
    and ``document_keys`` have one item per document: the client's id, and the registry's key (empty: the documents are
    not published). ``retrieved`` is for the report.
    """

    options: CacheOptions
    chunk_ids: tuple[str | None, ...] = ()
    document_keys: tuple[DocumentKey, ...] = ()
    report: dict[str, Any] | None = None
    decide: Decide | None = None
    retrieved: Found | None = None


@dataclass(frozen=True, slots=True)
class ChunkedRequest:
    """A rendered prompt's segments. ``prompt`` is ``None`` if it has no chunks."""

    ticket: Ticket
    prompt: ChunkedPrompt | None

    @property
    def document_keys(self) -> tuple[DocumentKey, ...]:
        """The registry's keys of the documents."""
        return self.ticket.document_keys

    def options(self, adapter: str) -> CacheOptions:
        """The request's options after the server's choice; ``adapter`` identifies the weights."""
        if self.ticket.decide is None or self.prompt is None:
            return self.ticket.options
        return self.ticket.decide(self.ticket.options, len(self.prompt.chunks), adapter)


def salted_namespace(namespace: str, cache_salt: str | None) -> str:
    """The namespace of a request's keys: a client's own ``cache_salt`` separates them like another namespace."""
    return f"{namespace}\0{cache_salt}" if cache_salt else namespace
