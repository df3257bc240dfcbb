# SPDX-License-Identifier: Apache-2.0
"""A reader of chunked prompts in plain transformers, for the scripts that measure models.

Each answer has a row of its own, with the KV that it attends to; rows are read together, whatever their lengths.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from cache.positions.layout import ChunkedPrompt, TokenIds
from measuring.quality.client import LEAD
from measuring.quality.questions.questions import Question
from training.adapt.material import Task, Template

KeysAndValues = list[tuple[Tensor, Tensor]]
"""K and V of each layer, ``[KV heads, tokens, head size]``."""


class Row:
    """The KV of one answer in the making.

    Attributes:
        position: of the next token.
    """

    def __init__(self, context: KeysAndValues, room: int, position: int) -> None:
        self.position = position
        self._length = context[0][0].shape[1]
        self._layers = [[F.pad(each, (0, 0, 0, room)) for each in layer] for layer in context]

    @property
    def context(self) -> KeysAndValues:
        """All KV that was written."""
        return [(keys[:, : self._length], values[:, : self._length]) for keys, values in self._layers]

    def advance(self, tokens: int) -> None:
        """Counts tokens that were written; a negative number takes them back."""
        self._length += tokens
        self.position += tokens

    def attention(self, module: Any, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Writes the K and V of new tokens; ``query`` and what it returns are ``[heads, tokens, head size]``."""
        end = self._length + key.shape[1]
        keys, values = (each[:, :end] for each in self._layers[module.layer_idx])
        keys[:, self._length :], values[:, self._length :] = key, value
        window = getattr(module, "sliding_window", None) or end
        attention = partial(
            F.scaled_dot_product_attention, query[None], keys[None], values[None], scale=scaling, enable_gqa=True
        )
        if key.shape[1] == end <= window:
            return attention(is_causal=True)[0]  # half the work of a mask
        distances = torch.arange(self._length, end)[:, None] - torch.arange(end)
        seen = (distances >= 0) & (distances < window)
        return attention(attn_mask=seen)[0]


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, _mask: None, scaling: float, rows: list[Row], **_: Any
) -> tuple[Tensor, None]:
    """Attention of each row to its own KV, as a function of transformers."""
    each = zip(rows, query, key, value, strict=True)
    return torch.stack([row.attention(module, q, k, v, scaling) for row, q, k, v in each]).transpose(1, 2), None


ALL_ATTENTION_FUNCTIONS.register("rows", attend)


class Reader:
    """A model that reads prompts both ways and answers in rows, one for each context."""

    def __init__(self, folder: Path, contexts: Sequence[str]) -> None:
        self._ways = contexts
        self.tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self._template = Template(self.tokenizer)
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="rows", local_files_only=True
        ).eval()
        ends = self._model.generation_config.eos_token_id
        self._ends = set(ends if isinstance(ends, list) else [ends])
        config = self._model.config
        self._layer_types = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
        self._chunks: dict[tuple[int, ...], KeysAndValues] = {}

    def prompt(self, question: Question) -> ChunkedPrompt:
        """The question's segments, as the server makes them."""
        asked = self._template.branch(question.system, Task(question.question, "")).question
        prompt = self._template.prompt(question.system, question.chunks)
        return replace(prompt, question=asked)

    @torch.inference_mode()
    def answers(self, questions: Sequence[Question], max_tokens: int) -> list[list[tuple[str, float | None]]]:
        """Each row's greedy answer, and the log probability of the right one behind :data:`LEAD`, by question."""
        groups, last, logprobs = [], [], []
        for question in questions:
            prompt = self.prompt(question)
            groups.append(rows := self._rows(question, prompt, max_tokens))
            if prompt.question[:-1]:
                self._forward([prompt.question[:-1]] * len(rows), rows)
            last += [prompt.question[-1]] * len(rows)
            logprobs += self._logprobs(question, prompt.question[-1], rows)
        told = zip(self._decode(last, [row for rows in groups for row in rows], max_tokens), logprobs, strict=True)
        return [[next(told) for _ in rows] for rows in groups]

    def _rows(self, question: Question, prompt: ChunkedPrompt, max_tokens: int) -> list[Row]:
        room = len(prompt.question) + max(max_tokens, len(self._forced(question)))
        return [Row(context, room, position) for context, position in self._contexts(prompt)]

    def _contexts(self, prompt: ChunkedPrompt) -> Iterator[tuple[KeysAndValues, int]]:
        """Each row's context, and the question's position behind it."""
        shared_end = len(prompt.system) + max(chunk.num_tokens for chunk in prompt.chunks)
        for way in self._ways:
            context = self._read(prompt) if way == "full" else self._joined(self._parts(prompt, way))
            yield context, shared_end if way == "shared" else prompt.num_context_tokens

    def _forced(self, question: Question) -> list[int]:
        return self._ids(f"{LEAD} {question.answers[0]}") if question.answers else []

    def _logprobs(self, question: Question, last: int, rows: list[Row]) -> list[float | None]:
        if not (forced := self._forced(question)):
            return [None] * len(rows)
        lead = self._ids(LEAD)
        begin = next(i for i, token in enumerate(forced) if token not in lead[i : i + 1])
        logits = self._forward([[last, *forced[:-1]]] * len(rows), rows, keep=len(forced))
        for row in rows:
            row.advance(-len(forced))
        told = logits.float().log_softmax(-1)[:, range(begin, len(forced)), forced[begin:]]
        return [float(each) for each in told.sum(-1)]

    def _decode(self, last: list[int], rows: list[Row], max_tokens: int) -> list[str]:
        told: list[list[int]] = [[] for _ in rows]
        still = list(range(len(rows)))
        for _ in range(max_tokens):
            logits = self._forward([[last[row]] for row in still], [rows[row] for row in still])
            for row, token in zip(still, logits[:, -1].argmax(-1).tolist(), strict=True):
                last[row] = token
                told[row] += [token] if token not in self._ends else []
            if not (still := [row for row in still if last[row] not in self._ends]):
                break
        return [self.tokenizer.decode(tokens, skip_special_tokens=True) for tokens in told]

    def _read(self, prompt: ChunkedPrompt) -> KeysAndValues:
        """The context in full attention."""
        return self._computed(prompt.token_ids[: prompt.num_context_tokens])

    def _parts(self, prompt: ChunkedPrompt, way: str) -> list[KeysAndValues]:
        """The system segment and the chunks, each computed behind it, or behind the template's opening (``isolated``).

        All but ``shared`` and ``parallel`` move the chunks to their places.
        """
        before, at = self._opening if way == "isolated" else prompt.system, len(prompt.system)
        parts = [self._remembered(prompt.system)]
        for chunk in prompt.chunks:
            computed = self._remembered([*before, *chunk.token_ids])
            cut = [(keys[:, len(before) :], values[:, len(before) :]) for keys, values in computed]
            parts.append(cut if way in ("shared", "parallel") else self._moved(cut, at - len(before)))
            at += chunk.num_tokens
        return parts

    @cached_property
    def _opening(self) -> TokenIds:
        mark = "[documents]"
        text = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": mark}], add_generation_prompt=True, tokenize=False
        )
        return self._template.segments.encode_template(text.partition(mark)[0])

    @staticmethod
    def _joined(parts: Iterable[KeysAndValues]) -> KeysAndValues:
        layers = (zip(*layer, strict=True) for layer in zip(*parts, strict=True))
        return [(torch.cat(keys, 1), torch.cat(values, 1)) for keys, values in layers]

    def _remembered(self, ids: Sequence[int]) -> KeysAndValues:
        if (found := self._chunks.get(tuple(ids))) is None:
            found = self._chunks[tuple(ids)] = self._computed(ids)
        return found

    def _computed(self, ids: Sequence[int]) -> KeysAndValues:
        config = self._model.config
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        nothing = torch.empty(config.num_key_value_heads, 0, size)
        self._forward([ids], [row := Row([(nothing, nothing)] * len(self._layer_types), len(ids), 0)])
        return row.context

    def _moved(self, part: KeysAndValues, distance: int) -> KeysAndValues:
        """The part with its keys turned by ``distance`` positions."""
        return [
            (apply_rotary_pos_emb(keys, keys, *self._angles(distance, layer), unsqueeze_dim=0)[0], values)
            for (keys, values), layer in zip(part, self._layer_types, strict=True)
        ]

    def _angles(self, distance: int, layer_type: str) -> tuple[Tensor, Tensor]:
        rotary, position = self._model.model.rotary_emb, torch.tensor([[distance]])
        given = (layer_type,) if len(set(self._layer_types)) > 1 else ()
        cos, sin = rotary(torch.zeros(1, dtype=self._model.dtype), position, *given)
        return cos[0], sin[0]

    def _forward(self, ids: Sequence[Sequence[int]], rows: list[Row], keep: int = 1) -> Tensor:
        """Logits ``[rows, keep, vocabulary]`` behind ``ids``, as many tokens for each row; their KV is written."""
        positions = torch.tensor([[row.position] for row in rows]) + torch.arange(len(ids[0]))
        found = self._model(
            input_ids=torch.tensor(ids),
            position_ids=positions,
            use_cache=False,
            logits_to_keep=keep,
            rows=rows,
        )
        for row in rows:
            row.advance(len(ids[0]))
        return found.logits  # type: ignore[no-any-return]

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)  # type: ignore[no-any-return]
