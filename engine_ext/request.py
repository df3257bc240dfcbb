# SPDX-License-Identifier: Apache-2.0
"""A request with chunks on its way from the prompt renderer to the engine."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from cache.layout import ChunkedPrompt, PositionStrategy
from cache.report import CacheReport

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput

REQUEST_KEY = "tessera_request"
"""Key under which a rendered prompt carries its :class:`ChunkedRequest` to :class:`ChunkEngine`."""

Outputs = AsyncGenerator["RequestOutput", None]

CacheMode = Literal["auto", "chunked", "full"]


class FullAttentionError(Exception):
    """A request can't be served from the chunk cache; the message says why. Nothing of it was given to the client.

    ``kind`` is one of a few words, to count by.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """What a client may choose. ``chunked`` is ``auto`` that fails instead of falling back to full attention."""

    mode: CacheMode = "auto"
    position_strategy: PositionStrategy = PositionStrategy.SHARED
    namespace: str = "default"
    explain: bool = False


@dataclass(slots=True, eq=False)
class Ticket:
    """One HTTP request's options on the way in, its cache report on the way out."""

    options: CacheOptions
    chunk_ids: tuple[str | None, ...] = ()
    report: CacheReport | None = None


@dataclass(frozen=True, slots=True)
class ChunkedRequest:
    """A rendered prompt's segments. ``prompt`` is ``None`` if it has no chunks."""

    ticket: Ticket
    prompt: ChunkedPrompt | None
