# SPDX-License-Identifier: Apache-2.0
"""Citations: the chunks that each sentence of an answer rests on, by the attention while its tokens were chosen."""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from tokenizers.decoders import DecodeStream
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams

from cache.report import Citation, CitedChunk
from engine_ext.client.call import EngineCall

MOST_CHUNKS: Final = 3
"""Of one sentence."""
LEAST_LIFT: Final = 1.25
"""Of a chunk that a sentence rests on: such a multiple of its usual share of the attention to all chunks."""

# A line, or a part of it up to a full stop that a space follows, or one of Chinese or Japanese.
_SENTENCE: Final = re.compile(r"\S[^\n]*?(?:(?<![.!?…])[.!?…]++[\"'”’)\]*_]*+(?=\s|\Z)|[。！？]++|(?=\n|\Z))")
_LABEL: Final = re.compile(r"(?:\w{1,2}\.\s?)+")
"""Of what follows: "1." of a list, "Dr."."""
_TINY: Final = 1e-30


@dataclass(slots=True)
class AnswerSoFar:
    """The one answer of a request: its tokens, and its text as the client gets it."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)

    def add(self, output: RequestOutput, params: SamplingParams) -> None:
        """Take in the next output."""
        completion = output.outputs[0]
        if params.output_kind is not RequestOutputKind.DELTA:
            self.text, self.token_ids = "", []
        self.text += completion.text
        self.token_ids += completion.token_ids

    def places(self, call: EngineCall) -> list[tuple[int, int]]:
        """First character and end of each token; those of a character's bytes but the last are empty."""
        tokenizer = call.llm.renderer.get_tokenizer().backend_tokenizer
        skips_special, end, places = call.params.skip_special_tokens, 0, list[tuple[int, int]]()
        stream = DecodeStream(skip_special_tokens=skips_special)
        for token_id in self.token_ids:
            try:
                piece = stream.step(tokenizer, token_id)
            except Exception:  # it raises nothing narrower, at bytes that are no character; vLLM goes on likewise
                stream = DecodeStream(skip_special_tokens=skips_special)
                piece = stream.step(tokenizer, token_id)
            places.append((end, end := end + len(piece or "")))
        return places


def sentences(text: str) -> Iterator[tuple[int, int]]:
    """First character and end of each sentence of ``text``, without the white space around it."""
    begin = None
    for match in _SENTENCE.finditer(text):
        start, end = match.span()
        begin = start if begin is None else begin
        if _LABEL.fullmatch(text, begin, end) and text[end : end + 1] == " ":
            continue
        yield begin, end
        begin = None
    if begin is not None:
        yield begin, len(text.rstrip())


def citations(
    text: str, places: Sequence[tuple[int, int]], attention: NDArray[Any], expected: NDArray[Any]
) -> list[Citation]:
    """Cite the chunks that each sentence of ``text`` rests on.

    ``places`` has each token's first character and end, ``attention`` ``[tokens, chunks]`` each token's to each chunk.
    ``expected`` ``[chunks]`` has the attention that the chunks get in any case, in any unit.
    """
    usual = expected / max(expected.sum(), _TINY)
    total = np.concatenate([np.zeros((1, len(expected))), np.cumsum(attention, 0, np.float64)])
    starts, ends = zip(*places, strict=True) if places else ((), ())
    found = []
    for start, end in sentences(text):
        # Its tokens: a first one may begin before it, with white space.
        paid = total[bisect_left(starts, end)] - total[bisect_right(ends, start)]
        share = paid / max(paid.sum(), _TINY)
        lift = share / np.maximum(usual, _TINY) * (usual > 0)
        cited = [
            CitedChunk(chunk=number, share=share[number], lift=lift[number], is_weak=bool(lift[number] < LEAST_LIFT))
            for number in np.argsort(-lift, kind="stable")[:MOST_CHUNKS].tolist()
        ]
        found.append(Citation(start=start, end=end, chunks=cited))
    return found
