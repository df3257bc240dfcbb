# SPDX-License-Identifier: Apache-2.0
"""Documents that a request reads again: written once more between its chunks and its question.

A chunk's cached KV knows nothing of the other chunks, which loses answers, above all those that need two of them. The
chunks that the question attends to most are repeated before it, as ordinary text: their tokens see every chunk, and one
another. The cached chunks stay where they are, so nothing is lost of what wasn't chosen.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

from cache.positions.layout import ChunkedPrompt, Layout, TokenIds, unpack
from cache.sparse import by_attention
from engine_ext.client.call import EngineCall


@dataclass(frozen=True, slots=True)
class Reread:
    """The call with ``documents`` of its prompt, by number, written again before the question, and its layout."""

    documents: Sequence[int]
    token_ids: Sequence[TokenIds]
    """Of each document."""
    call: EngineCall
    layout: Layout


def reread(
    prompt: ChunkedPrompt, layout: Layout, attention: Sequence[Sequence[float]], share: float, call: EngineCall
) -> Reread | None:
    """Choose the documents by the attention to each token of each chunk; ``None`` if not even one fits.

    They are a ``share`` of the tokens of all documents, to the nearest whole chunk, and leave the answer its room.
    """
    documents = [prompt.chunks[index] for index in prompt.documents]
    paid = [sum(attention[index]) for index in prompt.documents]
    budget = share * sum(chunk.num_tokens for chunk in documents)
    room, chosen, num_tokens = _room(layout, call), list[int](), 0
    for number in by_attention(paid):
        length = documents[number].num_tokens
        if num_tokens + length / 2 <= budget and num_tokens + length <= room:
            chosen.append(number)
            num_tokens += length
    if not chosen:
        return None
    chosen.sort()
    again = [unpack(documents[number].packed_in_prompt) for number in chosen]
    token_ids = [*prompt.token_ids[: prompt.num_context_tokens], *chain(*again), *prompt.question]
    question = replace(layout.question, length=layout.question.length + num_tokens)
    return Reread(chosen, again, call.with_tokens(token_ids), replace(layout, question=question))


def _room(layout: Layout, call: EngineCall) -> int:
    """The tokens that the prompt can grow by: half of what is left for the answer, if that has no length of its own."""
    left: int = call.llm.model_config.max_model_len - call.num_prompt_tokens
    if call.position_limit is not None:
        left = min(left, call.position_limit - layout.reach)
    most = call.params.max_tokens
    return left // 2 if most is None or most >= left else left - most
