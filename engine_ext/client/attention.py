# SPDX-License-Identifier: Apache-2.0
"""The attention that tokens behind a request's chunks pay to them, measured over their cached KV.

A *probe* is a question, or an answer, behind the request's leased segments, run to the first token; the workers measure
it where they read the keys (:mod:`engine_ext.core.attention.probes`). Most layers favour places over contents, so the
attention of a question without content ("N/A"), asked in its place, is what they would get in any case.
"""

import asyncio
import itertools
import secrets
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from cache.errors import FullAttentionError
from cache.positions.layout import TokenIds
from engine_ext.chunks.prefill import run_plan
from engine_ext.client.call import EngineCall, is_error
from engine_ext.client.segments import FilledSegments
from engine_ext.wire.plan import TransferPlan

if TYPE_CHECKING:
    from engine_ext.client.recompute import Recomputed
    from engine_ext.core.attention.probes import Measured

_numbers: Final = itertools.count()


@dataclass(frozen=True, slots=True)
class _Attention:
    """Attention on average over heads and layers: of all tokens to each token of the context, and of each to a span."""

    to_tokens: list[float]
    to_spans: list[list[float]]


async def attention_to_chunks(filled: FilledSegments, call: EngineCall) -> list[list[float]]:
    """Measure the question's attention to each token of each chunk, on average over heads, layers and its tokens.

    It is less than 0 where the question attends less than one without content. Raises :class:`FullAttentionError`.
    """
    prompt, plan = filled.placed.request.chunked(), TransferPlan.for_answer(filled.lease, attends=True)
    questions = [prompt.question, *([prompt.blank] if prompt.blank else [])]
    attention, *blank = await _all(_measured(filled, plan, each, call) for each in questions)
    paid = attention.to_tokens
    for other in blank:
        paid = [each - at_least for each, at_least in zip(paid, other.to_tokens, strict=True)]
    return [paid[at.start : at.start + at.length] for at in filled.placed.layout.chunks]


async def attention_of_answer(
    filled: FilledSegments, fresh: "Recomputed | None", answer: Sequence[int], call: EngineCall
) -> tuple[list[list[float]], list[float]]:
    """Measure the attention to each document's chunk while each token of ``answer`` was being chosen.

    Return it with that of a question without content, or with the chunks' lengths where the chat template has no place
    for one. Raises :class:`FullAttentionError`.
    """
    prompt, places = filled.placed.request.chunked(), filled.placed.layout.chunks
    chunks = [at for at, chunk in zip(places, prompt.chunks, strict=True) if not chunk.is_text]
    plan = TransferPlan.for_answer(filled.lease, fresh.segments if fresh else (), attends=True)
    tokens = [(*prompt.question, *answer[:-1]), *([prompt.blank] if prompt.blank else [])]
    attention, *blank = await _all(_measured(filled, plan, each, call) for each in tokens)

    def to_chunks(to_spans: Sequence[float]) -> list[float]:
        each_span = list(zip(plan.loads, to_spans, strict=True))
        return [sum(each for span, each in each_span if at.start <= span.start < at.start + at.length) for at in chunks]

    paid = [to_chunks(each) for each in attention.to_spans[len(prompt.question) - 1 :]]
    if not blank:
        return paid, [float(at.length) for at in chunks]
    of_blank = [to_chunks(each) for each in blank[0].to_spans]
    return paid, [sum(each) / len(of_blank) for each in zip(*of_blank, strict=True)]


async def _all(probes: Iterable[Coroutine[Any, Any, _Attention]]) -> list[_Attention]:
    """The results of all probes, once all have ended; raises the first one's error."""
    measured = await asyncio.gather(*probes, return_exceptions=True)
    if error := next((each for each in measured if isinstance(each, BaseException)), None):
        raise error
    return [each for each in measured if not isinstance(each, BaseException)]


async def _measured(filled: FilledSegments, plan: TransferPlan, tokens: TokenIds, call: EngineCall) -> _Attention:
    """The attention of ``tokens`` to the context that ``plan`` loads."""
    prompt, number = filled.placed.request.chunked(), next(_numbers)
    prompt_ids = [*prompt.token_ids[: prompt.num_context_tokens], *tokens]
    # With a salt of its own: vLLM's prefix cache must not have its queries, nor anybody else its blocks.
    name, salt = f"{call.request_id}-probe-{number}", secrets.token_hex(16)
    try:
        output = await run_plan(call.llm, prompt_ids, replace(plan, probe=number), name, salt, **call.fill_kwargs())
    finally:
        by_worker = await call.take_attention(number)
    if is_error(output):
        await filled.forget_refused(call.request_id)
        raise FullAttentionError("load refused", "a worker refused to read the cached chunks")
    return _mean(by_worker, number)


def _mean(by_worker: "Sequence[Measured | None]", number: int) -> _Attention:
    """The mean over all workers, each of which has some of the heads or layers."""
    known = [measured for measured in by_worker if measured is not None and measured[0]]
    assert known, f"no worker measured probe {number}"
    num_rows = sum(rows for rows, _, _ in known)
    to_tokens = [sum(each) / num_rows for each in zip(*(weights for _, weights, _ in known), strict=True)]
    num_layers = num_rows / len(known[0][2])
    to_spans = [
        [sum(each) / num_layers for each in zip(*of_workers, strict=True)]
        for of_workers in zip(*(by_token for _, _, by_token in known), strict=True)
    ]
    return _Attention(to_tokens, to_spans)
