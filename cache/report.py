# SPDX-License-Identifier: Apache-2.0
"""The cache report of one request: tokens reused, tokens computed, and reasons."""

from dataclasses import dataclass, field
from typing import Any, Literal

from cache.lease import ChunkStatus
from cache.positions.layout import Chunk, ChunkedPrompt, Layout, PositionStrategy, TokenIds


@dataclass(slots=True)
class ChunkReport:
    """One chunk of the request. ``key`` and ``status`` are ``None`` when it ran in full attention.

    ``origin`` names the replica or tier that a chunk came from; ``why`` is the reason for which a chunk that may be in
    a tier was computed.
    """

    chunk: Chunk
    key: str | None = None
    status: ChunkStatus | None = None
    origin: str | None = None
    why: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        shown = {"key": self.key, "tokens": self.chunk.num_tokens, "status": self.status}
        origin = {name: text for name, text in (("origin", self.origin), ("why", self.why)) if text is not None}
        return {**self.chunk.label, **shown, **origin}


@dataclass(slots=True)
class TokenCounts:
    """Prompt tokens of a request.

    ``reused + computed == prompt``. ``computed`` counts the engine's tokens in the main request, and in its own fill
    requests for the segments they saved. ``fill_computed`` counts all of the engine's tokens in these fill requests,
    including the system segment in front of each chunk.
    """

    prompt: int
    reused: int = 0
    computed: int = 0
    fill_computed: int = 0


@dataclass(slots=True)
class CacheReport:
    """The report of a running request; :meth:`to_dict` gives the clients' form."""

    position_strategy: PositionStrategy
    scope: str
    tokens: TokenCounts
    chunks: list[ChunkReport]
    mode: Literal["chunked", "full"] = "full"
    reason: str | None = None
    decision: dict[str, str] | None = None
    """The server's own choice of mode, and its reason."""
    placement: Literal["in-place"] | None = None
    """``in-place`` if the engine's blocks were shared; ``None`` if chunks were copied."""
    links: dict[str, Any] | None = None
    """Number and context of link tokens, if any."""
    compare: dict[str, Any] | None = None
    """Comparison with full attention, if requested."""
    timings_ms: dict[str, float] = field(default_factory=dict)
    segments: list[dict[str, Any]] | None = None
    opening: TokenIds | None = None
    """The tokens before each chunk where it was computed, if not the system segment; beside ``segments``."""

    def to_dict(self) -> dict[str, Any]:
        """The JSON form; see ``docs/request-path.md``."""
        report: dict[str, Any] = {
            "mode": self.mode,
            "reason": self.reason,
            "position_strategy": self.position_strategy.value,
            "scope": self.scope,
            "tokens": {
                "prompt": self.tokens.prompt,
                "reused": self.tokens.reused,
                "computed": self.tokens.computed,
                "fill_computed": self.tokens.fill_computed,
            },
            "chunks": [chunk.to_dict() for chunk in self.chunks],
            "timings_ms": {name: round(value, 3) for name, value in self.timings_ms.items()},
        }
        for name in ("decision", "placement", "links", "compare"):
            if (value := getattr(self, name)) is not None:
                report[name] = value
        if self.segments is not None:
            report["segments"] = self.segments
            if self.opening is not None:
                report["opening"] = list(self.opening)
        return report


def explain_segments(prompt: ChunkedPrompt, layout: Layout | None) -> list[dict[str, Any]]:
    """Segments with token ids and the logical position of each first token; plain indices without a layout."""
    tokens = [prompt.system, *(chunk.token_ids for chunk in prompt.chunks), prompt.question]
    kinds = ["system", *["chunk"] * len(prompt.chunks), "question"]
    if layout is not None:
        positions = [p.position for p in (layout.system, *layout.chunks, layout.question)]
    else:
        positions = [sum(map(len, tokens[:i])) for i in range(len(tokens))]
    return [
        {"kind": kind, "token_ids": list(ids), "position": position}
        for kind, ids, position in zip(kinds, tokens, positions, strict=True)
    ]
