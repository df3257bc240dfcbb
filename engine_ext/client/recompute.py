# SPDX-License-Identifier: Apache-2.0
"""Windows of a request's chunks that are computed anew, behind everything before them.

A chunk's cached KV knows nothing of the chunks before it, which loses answers that need two of them. The windows that
the question attends to most (:mod:`cache.windows`) are computed in one request of their own: its tokens are the
windows one after another, and each sees what precedes it in the sequence, earlier windows as computed here, the rest
as cached. Their KV is saved to pages of this one request, which reads them in place of the cached tokens.

The same request computes the text that stands between documents found in a prompt.
"""

import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import accumulate

from cache.errors import CapacityError, FullAttentionError
from cache.lease import LeasedSegment
from cache.positions.layout import Place, pack
from cache.segments.index import SegmentIdentity
from cache.windows import Window, choose_windows, recomputed_tokens
from engine_ext.chunks.prefill import NotSavedError, run_prefill
from engine_ext.client.call import EngineCall, Stages
from engine_ext.client.segments import FilledSegments
from engine_ext.wire.plan import TransferPlan


@dataclass(frozen=True, slots=True)
class Recomputed:
    """Windows that were computed anew, and their leased KV."""

    windows: Sequence[Window]
    segments: Sequence[LeasedSegment]


def windows_of(filled: FilledSegments, attention: Sequence[Sequence[float]]) -> list[Window]:
    """Choose the windows of a request by the attention to each token of its chunks.

    A window is a page of the pool. A chunk that directly follows what it was computed behind has none: nothing would
    change. Nor has text that is computed anew in any case.
    """
    placed, prompt = filled.placed, filled.placed.request.chunked()
    own = [index for index, chunk in enumerate(prompt.chunks) if not (chunk.is_text and placed.computes_text)]
    budget = recomputed_tokens(placed.request.options.recompute, [placed.layout.chunks[index] for index in own])
    if own[:1] == [0] and prompt.opening is None and not prompt.chunks[0].context:
        del own[0]
    if not own:
        return []
    paid = [each for chunk in attention[own[0] :] for each in chunk]
    chunks, leased = [placed.layout.chunks[index] for index in own], [filled.lease.chunks[index] for index in own]
    chosen = choose_windows(paid, chunks, budget, filled.cache.config.page_tokens)
    windows = []
    for start, end in chosen:
        segment = next(each for each in leased if start < each.start + each.length)
        windows.append(_window(segment, start, end))
    return [each for each in windows if each.start]  # before the first token there is nothing


def text_windows(filled: FilledSegments) -> list[Window]:
    """The text between documents, as windows; none where that can't be computed so."""
    if not filled.placed.computes_text:
        return []
    chunks = filled.placed.request.chunked().chunks
    segments = (segment for chunk, segment in zip(chunks, filled.lease.chunks, strict=True) if chunk.is_text)
    return [_window(each, each.start, each.start + each.length) for each in segments]


def _window(segment: LeasedSegment, start: int, end: int) -> Window:
    # Its position is where its cached keys are, seen from the question.
    position = segment.entry.identity.num_prefix_tokens + segment.place.delta + start - segment.start
    return Window(start, end - start, position)


@asynccontextmanager
async def recomputed(
    filled: FilledSegments, windows: Sequence[Window], call: EngineCall, stages: Stages
) -> AsyncIterator[Recomputed]:
    """Compute ``windows`` anew behind ``filled``; raises :class:`FullAttentionError`."""
    manager, prompt = filled.cache.manager, filled.placed.request.chunked()
    starts = list(accumulate((each.length for each in windows), initial=windows[0].start))
    places = [
        Place(each.start, each.length, each.position, each.position - start)
        for each, start in zip(windows, starts, strict=False)
    ]
    tokens = [prompt.token_ids[each.start : each.end] for each in windows]
    identities = [SegmentIdentity(filled.placed.request.scope, b"", pack(tuple(each))) for each in tokens]
    with ExitStack() as stack:
        try:
            lease = stack.enter_context(manager.borrowed(identities, places))
        except CapacityError as error:
            raise FullAttentionError("capacity", str(error)) from error
        plan = TransferPlan.for_windows(filled.lease, lease.chunks, windows)
        prompt_ids = [*prompt.token_ids[: windows[0].start], *(token for each in tokens for token in each)]
        name, salt = f"{call.request_id}-windows", secrets.token_hex(16)
        with stages.stage("recompute", windows=len(windows)) as trace_headers:
            try:
                await run_prefill(call.llm, prompt_ids, plan, name, salt, **call.fill_kwargs(trace_headers))
            except NotSavedError as error:
                await filled.forget_refused(call.request_id)
                raise FullAttentionError("recompute failed", f"windows were not computed: {error}") from error
        for job in lease.fills:
            manager.fill_succeeded(job, "recomputed")
        yield Recomputed(windows, lease.chunks)
