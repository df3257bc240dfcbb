# SPDX-License-Identifier: Apache-2.0
"""Citations: the chunks that each sentence of an answer rests on, by the attention while its tokens were chosen."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

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

    def ends(self, call: EngineCall) -> list[int]:
        """For each token, the characters of the text up to it; those before it if it ends within a character."""
        tokenizer = call.llm.renderer.get_tokenizer().backend_tokenizer
        stream, end, ends = DecodeStream(skip_special_tokens=call.params.skip_special_tokens), 0, []
        for token_id in self.token_ids:
            end += len(stream.step(tokenizer, token_id) or "")
            ends.append(end)
        return ends


def sentences(text: str) -> Iterator[tuple[int, int]]:
    """First character and end of each sentence of ``text``, without the white space around it."""
    return (match.span() for match in _SENTENCE.finditer(text))


def citations(
    text: str, ends: Sequence[int], attention: Sequence[Sequence[float]], expected: Sequence[float]
) -> list[Citation]:
    """Cite the chunks that each sentence of ``text`` rests on.

    ``ends`` has the number of characters up to each token, ``attention`` each token's to each chunk. ``expected`` has
    the attention that the chunks get in any case, in any unit.
    """
    found = []
    for start, end in sentences(text):
        rows = [row for begin, row in zip([0, *ends], attention, strict=False) if start <= begin < end]
        paid = [sum(each) for each in zip(*rows, strict=True)] or [0.0] * len(expected)
        shares = zip(_shares(paid), _shares(expected), strict=True)
        lifts = [(share, share / usual if usual else 0.0) for share, usual in shares]
        cited = [
            CitedChunk(chunk=number, share=share, lift=lift, is_weak=lift < LEAST_LIFT)
            for number, (share, lift) in enumerate(lifts)
        ]
        cited.sort(key=lambda each: -each.lift)
        found.append(Citation(start=start, end=end, chunks=cited[:MOST_CHUNKS]))
    return found


def _shares(attention: Sequence[float]) -> list[float]:
    total = sum(attention)
    return [each / total if total else 0.0 for each in attention]
