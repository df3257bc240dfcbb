# SPDX-License-Identifier: Apache-2.0
"""The cache report of one request: tokens reused, tokens computed, and reasons.

The models are the report while its request runs, its JSON, and its schema on the OpenAPI page.
"""

from collections.abc import Iterable
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, PlainSerializer

from cache.lease import ChunkStatus
from cache.positions.layout import Chunk, ChunkedPrompt, Layout, PositionStrategy, TokenIds, unpack

ScopeName = Literal["system", "isolated"]
Rounded = Annotated[float, PlainSerializer(lambda value: round(value, 3), return_type=float)]
FindsDocuments = Literal["off", "auto"]
"""Whether documents are looked for in the texts of a prompt."""


class Shape(BaseModel):
    """A JSON object without fields that are not named here. A field with a default is left out while it has it."""

    model_config = ConfigDict(extra="forbid")


class Part(Shape):
    """Which part of a long document a chunk is."""

    number: int
    of: int


class ChunkLabel(Shape):
    """Index and id of a chunk's document; ``part`` if the document became several chunks."""

    index: int
    id: str | None
    part: Part | None = None


class ReportedChunk(ChunkLabel):
    """``key`` and ``status`` are ``null`` in full attention. ``origin``: replica or tier; ``why`` it was computed.

    ``share`` is the chunk's share of the question's attention, if it was measured. In a sparse request, chunks that are
    not ``kept`` have no status.
    """

    key: str | None
    tokens: int
    status: ChunkStatus | None
    origin: str | None = None
    why: str | None = None
    share: float | None = None
    kept: bool = True
    recomputed: list[tuple[int, int]] = []
    """Windows that were computed anew: first token and end, from the chunk's first token on."""
    reread: bool = False
    """Whether the prompt has it once more, before the question."""

    @classmethod
    def of(cls, chunk: Chunk) -> Self:
        """A chunk in full attention."""
        return cls(**chunk.label, key=None, tokens=chunk.num_tokens, status=None)

    @classmethod
    def all_of(cls, chunks: Iterable[Chunk]) -> list[Self]:
        """The documents' chunks in full attention."""
        return [cls.of(chunk) for chunk in chunks if not chunk.is_text]


class Retrieved(Shape):
    """A passage that a collection gave for the question. ``page`` counts from 1; ``None`` in files without pages."""

    id: str
    file: str
    number: int
    page: int | None
    title: str | None
    score: float


class Found(NamedTuple):
    """Passages of a collection for the question; ``degraded``: why not ranked as the server's retriever does."""

    passages: list[Retrieved]
    degraded: str | None = None


class FoundDocument(Shape):
    """A document that was found in the prompt: characters ``[start, end)`` of the field ``at`` of the request.

    ``by``: the app whose form it has, or a passage that the server knows.
    """

    by: str
    at: str
    start: int
    end: int


class ReportedTokens(Shape):
    """Prompt tokens; ``reused + computed + left_out == prompt``."""

    # computed: in the main request, and in fill requests for segments that this request had filled; fill_computed:
    # everything that the engine computed in those fill requests, the system segment in front of each chunk included.
    prompt: int
    reused: int
    computed: int
    fill_computed: int
    left_out: int = 0
    """Of chunks that a sparse request has not kept."""
    reread: int = 0
    """Of chunks that the prompt has once more; they are computed, and usage counts them."""


class Segment(Shape):
    """With ``cache.explain`` only; ``position``: logical position of the first token."""

    kind: Literal["system", "chunk", "text", "reread", "question"]
    token_ids: TokenIds
    position: int
    context: TokenIds = ()
    """Of a chunk: the tokens of its document that it was computed behind."""


class Decided(Shape):
    """The mode that the server's profile has for such a request, and why."""

    mode: str
    why: str


class CitedChunk(Shape):
    """A chunk that a sentence rests on: its place in ``chunks``, and its share of the sentence's attention to all.

    ``lift``: how many times the share that a question without content would give it. ``is_weak``: it is too small to
    count as a citation.
    """

    chunk: int
    share: Rounded
    lift: Rounded
    is_weak: bool = False


class Citation(Shape):
    """A sentence of the answer: characters ``[start, end)`` of its text, and the chunks with the largest lifts.

    If all are weak, the sentence isn't from the documents, as far as attention tells: it is spread over them as that of
    a question without content is.
    """

    start: int
    end: int
    chunks: list[CitedChunk]


class Handed(Shape):
    """Blocks that another engine had computed for the request; ``why`` they were not used, or not to the end.

    ``lost``: computed again in full attention, since the engine needed their memory (a preemption).
    """

    outcome: Literal["taken", "refused", "failed", "lost"]
    why: str | None = None


class Report(Shape):
    """Tokens reused, tokens computed, and the reason for full attention."""

    mode: Literal["chunked", "full"]
    reason: str | None
    position_strategy: PositionStrategy
    scope: ScopeName
    tokens: ReportedTokens
    chunks: list[ReportedChunk]
    timings_ms: dict[str, Rounded]
    decision: Decided | None = None
    placement: Literal["in-place", "attend"] | None = None
    """``None``: the engine's blocks of the chunks were copies."""
    adapter: str | None = None
    """Digest of the server's adapter that computed the chunks, if there is one."""
    kv: Literal["requantized"] | None = None
    """Set where keys of a quantized KV cache were turned, and so rounded once more."""
    budget_share: float = 1
    """Share of the chunks' tokens that a sparse request may keep."""
    recompute: float = 0
    """Share of the chunks' tokens that may be computed anew, behind everything before them."""
    reread: float = 0
    """Share of the chunks' tokens that the prompt has once more."""
    handover: Handed | None = None
    citations: list[Citation] | None = None
    """The chunks that each sentence of the answer rests on; ``None``: not asked for, or ``uncited``."""
    uncited: str | None = None
    """Why there are no citations, though they were asked for."""
    retrieved: list[Retrieved] | None = None
    """The best first; ``None``: the request brought its documents itself."""
    retrieval_degraded: str | None = None
    """Why passages were ranked otherwise than the server's retriever does."""
    found: list[FoundDocument] | None = None
    """The documents that the server has found in the prompt's own text."""
    text_between: Literal["computed", "as chunks"] | None = None
    """How the text between them was computed: behind everything before it, or like a chunk."""
    segments: list[Segment] | None = None
    opening: TokenIds | None = None
    """Tokens that the chunks were computed behind, if not behind the system segment; beside ``segments``."""

    @classmethod
    def begun(
        cls,
        strategy: PositionStrategy,
        scope: ScopeName,
        num_tokens: int,
        chunks: Iterable[Chunk] = (),
        decision: Decided | None = None,
        timings_ms: dict[str, float] | None = None,
    ) -> Self:
        """The report of a prompt with ``num_tokens`` tokens: full attention, nothing reused, nothing computed yet.

        The report shows ``timings_ms`` as it is at the end.
        """
        report = cls(
            mode="full",
            reason=None,
            position_strategy=strategy,
            scope=scope,
            tokens=ReportedTokens(prompt=num_tokens, reused=0, computed=0, fill_computed=0),
            chunks=ReportedChunk.all_of(chunks),
            timings_ms={},
            decision=decision,
        )
        if timings_ms is not None:
            report.timings_ms = timings_ms  # the same dictionary: validation would have copied it
        return report

    def to_dict(self) -> dict[str, Any]:
        """The JSON form; see ``docs/request-path.md``."""
        return self.model_dump(mode="json", exclude_defaults=True)


def explain_segments(prompt: ChunkedPrompt, layout: Layout | None) -> list[Segment]:
    """Segments with token ids and logical positions of first tokens; plain indices without a layout."""
    tokens = [prompt.system, *(chunk.token_ids for chunk in prompt.chunks), prompt.question]
    kinds = ["system", *("text" if chunk.is_text else "chunk" for chunk in prompt.chunks), "question"]
    if layout is not None:
        positions = [p.position for p in (layout.system, *layout.chunks, layout.question)]
    else:
        positions = [sum(map(len, tokens[:i])) for i in range(len(tokens))]
    contexts: list[TokenIds] = [(), *(unpack(chunk.context) for chunk in prompt.chunks), ()]
    return [
        Segment(kind=kind, token_ids=ids, position=position, context=context if layout is not None else ())
        for kind, ids, position, context in zip(kinds, tokens, positions, contexts, strict=True)
    ]
