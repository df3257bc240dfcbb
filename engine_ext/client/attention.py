# SPDX-License-Identifier: Apache-2.0
"""The attention that a request's question pays to its chunks, measured over their cached KV.

A *probe* is the request's question behind its leased segments, run to the first token; the workers measure it where
they read the keys (:mod:`engine_ext.core.attention.probes`). Most layers favour places over contents, so the attention
of a question without content ("N/A"), asked in its place, is subtracted: what is left is due to the question.
"""

import asyncio
import itertools
import secrets
from collections.abc import Sequence
from typing import Final

from cache.errors import FullAttentionError
from cache.positions.layout import TokenIds
from engine_ext.chunks.prefill import run_plan
from engine_ext.client.call import EngineCall, is_error
from engine_ext.client.segments import FilledSegments
from engine_ext.wire.plan import TransferPlan

_numbers: Final = itertools.count()


async def attention_to_chunks(filled: FilledSegments, call: EngineCall) -> list[list[float]]:
    """Measure the question's attention to each token of each chunk, on average over heads, layers and its tokens.

    It is less than 0 where the question attends less than one without content. Raises :class:`FullAttentionError`.
    """
    prompt = filled.placed.request.chunked()
    questions = [prompt.question, *([prompt.blank] if prompt.blank else [])]
    measured = await asyncio.gather(*(_measured(filled, each, call) for each in questions), return_exceptions=True)
    for each in measured:
        if isinstance(each, BaseException):
            raise each
    attention, *blank = (each for each in measured if not isinstance(each, BaseException))
    for other in blank:
        attention = [paid - at_least for paid, at_least in zip(attention, other, strict=True)]
    return [attention[at.start : at.start + at.length] for at in filled.placed.layout.chunks]


async def _measured(filled: FilledSegments, question: TokenIds, call: EngineCall) -> list[float]:
    """The attention of ``question`` to each token before it."""
    prompt, number = filled.placed.request.chunked(), next(_numbers)
    plan = TransferPlan.for_answer(filled.lease, attends=True, probe=number)
    tokens = [*prompt.token_ids[: prompt.num_context_tokens], *question]
    # With a salt of its own: vLLM's prefix cache must not have its queries, nor anybody else its blocks.
    salt = secrets.token_hex(16)
    try:
        output = await run_plan(call.llm, tokens, plan, f"{call.request_id}-probe-{number}", salt, **call.fill_kwargs())
    finally:
        by_worker = await call.take_attention(number)
    if is_error(output):
        await filled.forget_refused(call.request_id)
        raise FullAttentionError("load refused", "a worker refused to read the cached chunks")
    return _mean(by_worker, number)


def _mean(by_worker: Sequence[tuple[int, list[float]] | None], number: int) -> list[float]:
    """The mean over all rows of all workers, each of which has some of the heads or layers."""
    known = [measured for measured in by_worker if measured is not None and measured[0]]
    assert known, f"no worker measured probe {number}"
    rows = sum(count for count, _ in known)
    return [sum(weights) / rows for weights in zip(*(weights for _, weights in known), strict=True)]
