# SPDX-License-Identifier: Apache-2.0
"""The attention that tokens behind a request's chunks pay to them, measured over their cached KV.

A *probe* is a question, or an answer, behind the request's leased segments, run to the first token; the workers measure
it where they read the keys (:mod:`engine_ext.core.attention.probes`). Most layers favour places over contents, so the
attention of a question without content ("N/A"), asked in its place, is what they would get in any case. Both are asked
in one request, which reads the model's weights and the segments once.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, count
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from cache.errors import FullAttentionError
from cache.positions.layout import TokenIds
from engine_ext.chunks.prefill import run_plan
from engine_ext.client.call import EngineCall, is_error
from engine_ext.client.segments import FilledSegments
from engine_ext.wire.plan import TransferPlan

if TYPE_CHECKING:
    from engine_ext.client.recompute import Recomputed
    from engine_ext.core.attention.probes import Measured

_numbers: Final = count()

Floats = NDArray[np.floating[Any]]


@dataclass(frozen=True, slots=True)
class _Attention:
    """Attention on average over heads and layers: of all tokens to each token of the context; of some to each span."""

    to_tokens: Floats
    to_spans: Floats
    """``[tokens, spans]``."""


async def attention_to_chunks(filled: FilledSegments, call: EngineCall) -> list[list[float]]:
    """Measure the question's attention to each token of each chunk, on average over heads, layers and its tokens.

    It is less than 0 where the question attends less than one without content. Raises :class:`FullAttentionError`.
    """
    prompt, plan = filled.placed.request.chunked(), TransferPlan.for_answer(filled.lease)
    questions = [prompt.question, *([prompt.blank] if prompt.blank else [])]
    attention, *blank = await _measured(filled, plan, questions, call)
    paid = attention.to_tokens - sum(each.to_tokens for each in blank)
    return [paid[at.start : at.start + at.length].tolist() for at in filled.placed.layout.chunks]


async def attention_of_answer(
    filled: FilledSegments, fresh: "Recomputed | None", answer: Sequence[int], call: EngineCall
) -> tuple[Floats, Floats]:
    """Measure the attention to each document's chunk, ``[tokens, chunks]``, while each token of ``answer`` was chosen.

    Return it with that of a question without content, ``[chunks]``, or with the chunks' lengths where the chat template
    has no place for one. Raises :class:`FullAttentionError`.
    """
    prompt, layout = filled.placed.request.chunked(), filled.placed.layout
    chunks = [layout.chunks[index] for index in prompt.documents]
    plan = TransferPlan.for_answer(filled.lease, fresh.segments if fresh else ())
    questions = [(*prompt.question, *answer[:-1]), *([prompt.blank] if prompt.blank else [])]
    attention, *blank = await _measured(filled, plan, questions, call, len(prompt.question) - 1)
    starts = np.array([span.start for span in plan.loads])
    # Windows divide a chunk into several spans; what is before and between the chunks counts for none.
    of_spans = [np.flatnonzero((at.start <= starts) & (starts < at.start + at.length)) for at in chunks]
    paid = np.stack([attention.to_spans[:, spans].sum(1) for spans in of_spans], 1)
    if not blank:
        return paid, np.array([at.length for at in chunks], np.float32)
    return paid, np.array([blank[0].to_tokens[at.start : at.start + at.length].sum() for at in chunks], np.float32)


async def _measured(
    filled: FilledSegments,
    plan: TransferPlan,
    questions: Sequence[TokenIds],
    call: EngineCall,
    probed_from: int | None = None,
) -> list[_Attention]:
    """The attention of each of ``questions`` to the context that ``plan`` loads, of all in one request if they fit."""
    room = call.llm.model_config.max_model_len - plan.num_loaded_tokens - 1
    if sum(map(len, questions)) <= room:
        return await _probe(filled, plan, questions, call, probed_from)
    return [each for one in questions for each in await _probe(filled, plan, [one], call, probed_from)]


async def _probe(
    filled: FilledSegments,
    plan: TransferPlan,
    questions: Sequence[TokenIds],
    call: EngineCall,
    probed_from: int | None,
) -> list[_Attention]:
    prompt, number = filled.placed.request.chunked(), next(_numbers)
    prompt_ids = [*prompt.token_ids[: prompt.num_context_tokens], *chain(*questions)]
    probe = plan.for_probe(number, list(map(len, questions)), probed_from)
    # With a salt of its own: vLLM's prefix cache must not have its queries, nor anybody else its blocks.
    name, salt = f"{call.request_id}-probe-{number}", secrets.token_hex(16)
    try:
        output = await run_plan(call.llm, prompt_ids, probe, name, salt, **call.fill_kwargs())
    finally:
        by_worker = await call.take_attention(number)
    if is_error(output):
        await filled.forget_refused(call.request_id)
        raise FullAttentionError("load refused", "a worker refused to read the cached chunks")
    known = [measured for measured in by_worker if measured]
    return [
        _mean([measured[i] for measured in known], len(tokens), len(plan.loads)) for i, tokens in enumerate(questions)
    ]


def _mean(by_worker: "Sequence[Measured]", num_tokens: int, num_spans: int) -> _Attention:
    """The mean over all workers, each of which has some of the heads or layers."""
    known = [measured for measured in by_worker if measured[0]]
    assert known, "no worker has measured anything"
    num_rows = sum(rows for rows, _, _ in known)
    to_tokens: Floats = np.array([weights for _, weights, _ in known], np.float32).sum(0)
    by_token = [np.frombuffer(kept, np.float32).reshape(-1, num_spans) for _, _, kept in known]
    to_spans: Floats = np.array(by_token).sum(0)
    return _Attention(to_tokens / num_rows, to_spans / (num_rows / num_tokens))
