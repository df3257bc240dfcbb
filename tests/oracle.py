# SPDX-License-Identifier: Apache-2.0
"""Reference answers from a Hugging Face model alone; imports nothing of Tessera.

A prompt consists of the segments `(system, chunks, question)`, each a list of token ids. There are five ways
to attend to them:

`full`    plain causal attention over all segments in a row.
`shared`  chunk-isolated attention. A chunk's tokens see the system segment and earlier tokens of their own
          chunk; the question and the answer see everything. Every chunk starts at position
          S = len(system); the question starts at S + the longest chunk's length. The context is one masked
          forward pass.
`parallel` like `shared`, but the question starts at its index: the sum of all lengths before it.
`window`  like `offset`, but no chunk starts more than `window` positions before the question, or than the longest
          chunk has, and the system segment starts at most its own length before that.
`offset`  each chunk's K and V are computed behind the system segment alone, at position S; K is then moved
          to the chunk's place in the row. The question follows the last chunk.

Moving needs no RoPE formula: attention depends on distances alone, so a chunk computed with everything before it
shifted by as many positions has the same V and the required K.

Layers with a sliding window see the last tokens by index in the computed row: for a chunk's tokens, the row it is
computed in; for question and answer, the whole prompt. Positions don't count there.

Each is decoded greedily (`Oracle.answer(strategy, segments, steps)`), or forced to follow given tokens
(`Oracle.score(strategy, segments, tokens)`), which compares even where two tokens tie.

Windows (`score` with `windows`, for each chunk a list of first token and end) are recomputed in order behind
everything before them, earlier windows as recomputed. The question then sees the new K and V in their place.

A sparse request keeps some chunks (`score` with `kept`): the others' K and V are left out, all positions stay.

Both are chosen by `attention`: that of the question, composed as in the strategy, to each token of its context.

A generated token may read some blocks of the row (`score` with `blocks`): the first, the last two, and for each KV
head those between that its own query attends to most, in a quarter of the channels. Answers are read token by token.

Contexts (`score` with `contexts`, one for each chunk) stand between system segment and chunk where that is computed.

With a `writer`, a chunk's own tokens are computed by that model, over the K and V of what is before them.

Scope `isolated` is `score` with an `opening`: each chunk's K and V are computed behind the opening alone, and K is
then moved to the chunk's place in the strategy; the system segment is computed alone, at position 0.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

Segments = tuple[Sequence[int], Sequence[Sequence[int]], Sequence[int]]
Strategy = str
"""`window-256` has the window in its name; with `window` it is longer than any prompt."""
Part = list[tuple[torch.Tensor, torch.Tensor]]
"""K and V of each layer, [1, heads, tokens, size]."""
STRATEGIES = ("full", "shared", "parallel", "offset")

SYSTEM, TAIL = -1, -2
"""Mask groups of tokens: system, and question or answer. Chunk i has group i."""


def attend(query, key, value, attention_mask, scaling):
    """Plain attention, [1, tokens, heads, size], and its weights."""
    groups = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(groups, dim=1) for each in (key, value))
    logits = query.float() @ key.float().transpose(2, 3) * scaling + attention_mask.float()
    weights = logits.softmax(-1)
    return (weights @ value.float()).to(query.dtype).transpose(1, 2), weights


def catch(module, query, key, value, attention_mask, scaling, caught, **_):
    """Attention that adds each layer's queries, `[heads, tokens, size]`, to `caught`."""
    caught.append(query[0] * scaling)
    return attend(query, key, value, attention_mask, scaling)


ALL_ATTENTION_FUNCTIONS.register("caught", catch)


def attend_to_blocks(module, query, key, value, attention_mask, scaling, size, number, **_):
    """One token's attention, [1, 1, heads, size], to `number` blocks of `size` tokens for each KV head.

    Blocks are chosen by the quarter of their channels with the largest keys.
    """
    kv_heads, length = key.shape[1:3]
    count = -(-length // size)
    read = torch.ones(kv_heads, count, dtype=torch.bool)
    if count > number:
        between = key[0, :, size : (count - 2) * size].unflatten(1, (-1, size))
        small = between.abs().mean(2, keepdim=True).topk(3 * key.shape[3] // 4, largest=False).indices
        between = between.scatter(3, small.expand(-1, -1, size, -1), 0)
        queries = query[0].reshape(kv_heads, 1, -1, key.shape[3]) * scaling
        masses = (queries @ between.transpose(2, 3)).logsumexp(-1)  # [KV heads, blocks, heads of each]
        best = masses.softmax(1).mean(2).topk(number - 3).indices
        read[:, 1:-2] = torch.zeros_like(read[:, 1:-2]).scatter(1, best, torch.ones_like(best, dtype=torch.bool))
    hidden = ~read.repeat_interleave(size, 1)[:, :length].repeat_interleave(query.shape[1] // kv_heads, 0)
    mask = attention_mask.masked_fill(hidden[None, :, None], -torch.inf)
    return attend(query, key, value, mask, scaling)


ALL_ATTENTION_FUNCTIONS.register("blocks", attend_to_blocks)


class Answer(NamedTuple):
    """Token ids, the log probability of each, and each step's log probabilities of the whole vocabulary."""

    tokens: list[int]
    logprobs: list[float]
    distributions: torch.Tensor  # [steps, vocabulary], float32


class Context(NamedTuple):
    """A processed prompt: its K and V, the log probabilities after its last token, the next position.

    `blocks` are arguments of `attend_to_blocks` for tokens behind it.
    """

    cache: DynamicCache
    distribution: torch.Tensor  # [vocabulary]
    next_position: int
    blocks: dict[str, Any] | None = None


class Oracle:
    """The reference model; `query_block`, the query rows per pass, bounds the memory of long prompts."""

    def __init__(
        self, model_path, dtype: torch.dtype = torch.float32, query_block: int = 2048, writer: "Oracle | None" = None
    ):
        self.writer = writer or self
        self.model = AutoModelForCausalLM.from_pretrained(
            model_path, dtype=dtype, attn_implementation="eager", local_files_only=True
        ).eval()
        self.dtype = dtype
        self.query_block = query_block
        self._layer_types = getattr(self.model.config, "layer_types", None) or []
        has_windows = "sliding_attention" in self._layer_types or not self._layer_types  # all layers, or none
        self.window = getattr(self.model.config, "sliding_window", None) if has_windows else None

    def full(self, token_ids: Sequence[int], steps: int) -> Answer:
        return self._decode(self._read_full(token_ids), steps=steps)

    def answer(self, strategy: Strategy, segments: Segments, steps: int) -> Answer:
        return self._decode(self._read(strategy, segments), steps=steps)

    def score(
        self,
        strategy: Strategy,
        segments: Segments,
        tokens: Sequence[int],
        opening: Sequence[int] | None = None,
        windows: Sequence[Sequence[tuple[int, int]]] | None = None,
        kept: Sequence[int] | None = None,
        contexts: Sequence[Sequence[int]] | None = None,
        blocks: dict[str, Any] | None = None,
    ) -> Answer:
        """Like `answer`, but forced to follow `tokens`; `blocks` are arguments of `attend_to_blocks`."""
        if blocks is not None:
            # Where vLLM has them, the question at its index: which channels of a key are large depends on its rotation.
            _, first = chunk_places(strategy, len(segments[0]), segments[1])
            moved_by = len(segments[0]) + sum(map(len, segments[1])) - first
            context = self._compose(strategy, segments, segments[0], moved_by=moved_by)
            return self._decode(context._replace(blocks=blocks), forced=tokens)
        if opening is None and not windows and kept is None and contexts is None:
            return self._decode(self._read(strategy, segments), forced=tokens)
        opening = segments[0] if opening is None else opening
        context = self._compose(strategy, segments, opening, windows, kept=kept, contexts=contexts)
        return self._decode(context, forced=tokens)

    def attention(
        self, strategy: Strategy, segments: Segments, layers: Sequence[int], opening: Sequence[int] | None = None
    ) -> list[list[float]]:
        """The question's attention to each token of each chunk: heads, tokens and layers are averaged."""
        system, chunks, question = segments
        opening = system if opening is None else opening
        _, first = chunk_places(strategy, len(system), chunks)
        before = len(system) + sum(map(len, chunks))
        seen = self._compose(strategy, (system, chunks, []), opening).cache
        masks = self._masks([TAIL] * len(question), [TAIL] * (before + len(question)))
        caught: list[torch.Tensor] = []
        self._forward(question, range(first, first + len(question)), masks, seen, ways={"caught": caught})
        causal = torch.full((len(question), before + len(question)), -torch.inf).triu(before + 1)
        total = torch.zeros(before)
        for layer in layers:
            queries, keys = caught[layer], seen.layers[layer].keys[0]
            keys = keys.repeat_interleave(len(queries) // len(keys), dim=0)
            total += (queries @ keys.transpose(1, 2) + causal).softmax(-1)[..., :before].mean((0, 1))
        shares, at = (total / len(layers)).tolist(), len(system)
        return [
            shares[start : start + len(chunk)]
            for start, chunk in zip(running_offsets(at, chunks), chunks, strict=False)
        ]

    def shared_logits(self, segments: Segments) -> torch.Tensor:
        """Logits at every prompt token, [tokens, vocabulary], of the one masked forward of `shared`."""
        ids, positions, groups = lay_out_overlapping("shared", segments)
        return self._forward(ids, positions, mask(groups, groups, self.dtype), None, last=0)

    def _read(self, strategy: Strategy, segments: Segments) -> Context:
        if strategy == "full":
            system, chunks, question = segments
            return self._read_full([*system, *(token for chunk in chunks for token in chunk), *question])
        # One row can't have the windows of all chunks, nor two models.
        if strategy in ("shared", "parallel") and self.window is None and self.writer is self:
            return self._prefill(*lay_out_overlapping(strategy, segments))
        assert strategy in STRATEGIES or strategy.startswith("window"), strategy
        return self._compose(strategy, segments, segments[0])

    def _read_full(self, token_ids: Sequence[int], moved_by: int = 0) -> Context:
        positions = range(moved_by, moved_by + len(token_ids))
        return self._prefill(token_ids, positions, [TAIL] * len(token_ids))

    def _compose(
        self,
        strategy: Strategy,
        segments: Segments,
        opening: Sequence[int],
        windows: Sequence[Sequence[tuple[int, int]]] | None = None,
        kept: Sequence[int] | None = None,
        moved_by: int = 0,
        contexts: Sequence[Sequence[int]] | None = None,
    ) -> Context:
        """A context composed of parts, each chunk computed behind `opening` and moved to its place.

        All is `moved_by` so many positions.
        """
        system, chunks, question = segments
        start = len(system)
        places, first = chunk_places(strategy, start, chunks)
        system_at = max(0, first - start - window_of(strategy, chunks)) + moved_by
        parts = [self._keys_and_values(system, moved_by=system_at)] if system else []
        for chunk, place, before in zip(chunks, places, contexts or [()] * len(chunks), strict=True):
            skip, at = len(opening) + len(before), place + moved_by
            seen = self._read_full([*opening, *before], at - skip).cache if skip else None
            groups = [TAIL] * len(chunk), seen, [TAIL] * skip
            computed = self.writer._prefill(chunk, range(at, at + len(chunk)), *groups).cache
            parts.append([(layer.keys[:, :, skip:], layer.values[:, :, skip:]) for layer in computed.layers])
        if kept is not None:
            parts = [*parts[: len(parts) - len(chunks)], *(parts[len(parts) - len(chunks) + index] for index in kept)]
            chunks, places = [chunks[index] for index in kept], [places[index] for index in kept]
        if windows:
            self._recompute(parts, chunks, places, windows)
        if not question:
            return Context(in_a_row(parts), torch.empty(0), first)
        composed = in_a_row(parts)
        before = start + sum(map(len, chunks))
        assert composed.get_seq_length() == before
        positions = range(first + moved_by, first + moved_by + len(question))
        return self._prefill(question, positions, [TAIL] * len(question), composed, [TAIL] * before)

    def _recompute(self, parts: list[Part], chunks, places, windows) -> None:
        """Recompute windows of the chunks, the last of the parts, in place."""
        offset = len(parts) - len(chunks)
        for index, (chunk, place) in enumerate(zip(chunks, places, strict=True)):
            for first, end in windows[index]:
                part = parts[offset + index]
                head = [(keys[:, :, :first], values[:, :, :first]) for keys, values in part]
                before = in_a_row([*parts[: offset + index], head])
                start, tokens = before.get_seq_length(), chunk[first:end]
                positions = range(place + first, place + end)
                computed = self._prefill(tokens, positions, [TAIL] * len(tokens), before, [TAIL] * start).cache
                parts[offset + index] = [
                    (
                        torch.cat([keys[:, :, :first], layer.keys[:, :, start:], keys[:, :, end:]], 2),
                        torch.cat([values[:, :, :first], layer.values[:, :, start:], values[:, :, end:]], 2),
                    )
                    for layer, (keys, values) in zip(computed.layers, part, strict=True)
                ]

    def _keys_and_values(self, token_ids: Sequence[int], moved_by: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
        cache = self._read_full(token_ids, moved_by).cache
        return [(layer.keys, layer.values) for layer in cache.layers]

    def _prefill(
        self,
        ids: Sequence[int],
        positions: Sequence[int],
        groups: Sequence[int],
        cache: DynamicCache | None = None,
        cached_groups: Sequence[int] = (),
    ) -> Context:
        """Processes tokens in blocks of query rows; a row's result is independent of other rows."""
        cache = DynamicCache() if cache is None else cache
        seen = list(cached_groups)
        for begin in range(0, len(ids), self.query_block):
            block = slice(begin, begin + self.query_block)
            seen += groups[block]
            masks = self._masks(groups[block], seen)
            logits = self._forward(ids[block], positions[block], masks, cache)
        return Context(cache, logits[-1].log_softmax(-1), positions[-1] + 1)

    def _decode(self, context: Context, steps: int = 0, forced: Sequence[int] | None = None) -> Answer:
        steps = steps if forced is None else len(forced)
        cache, distribution, position, blocks = context
        tokens, distributions = [], []
        for step in range(steps):
            tokens.append(int(distribution.argmax()) if forced is None else forced[step])
            distributions.append(distribution)
            if step + 1 < steps:
                masks = self._masks([TAIL], [TAIL] * (cache.get_seq_length() + 1))
                logits = self._forward(tokens[-1:], [position], masks, cache, ways=blocks)
                distribution, position = logits[-1].log_softmax(-1), position + 1
        logprobs = [float(row[token]) for row, token in zip(distributions, tokens, strict=True)]
        return Answer(tokens, logprobs, torch.stack(distributions) if distributions else torch.empty(0))

    def _masks(self, query_groups: Sequence[int], key_groups: Sequence[int]) -> torch.Tensor | dict[str, torch.Tensor]:
        """The mask, or one for each kind of layer."""
        rows = mask(query_groups, key_groups, self.dtype)
        if self.window is None:
            return rows
        windowed = rows + window_mask(rows, self.window)
        return {"full_attention": rows, "sliding_attention": windowed} if self._layer_types else windowed

    @torch.no_grad()
    def _forward(self, ids, positions, additive_mask, cache, last: int = 1, ways=None) -> torch.Tensor:
        """Logits [rows, vocabulary] in float32 of the `last` rows, or of all rows if 0.

        `ways` are arguments of `catch` or `attend_to_blocks`.
        """
        names = {"caught": "caught", "size": "blocks"}
        name = next((name for argument, name in names.items() if argument in (ways or {})), "eager")
        self.model.config._attn_implementation = name
        output = self.model(
            torch.tensor([list(ids)]),
            position_ids=torch.tensor([list(positions)]),
            attention_mask=additive_mask,
            past_key_values=cache,
            use_cache=cache is not None,
            logits_to_keep=last,
            **(ways or {}),
        )
        return output.logits[0].float()


def in_a_row(parts: Sequence[Part]) -> DynamicCache:
    """One cache of the parts' K and V."""
    composed = DynamicCache()
    for layers in parts:
        for index, (keys, values) in enumerate(layers):
            composed.update(keys, values, index)
    return composed


def lay_out_overlapping(strategy: Strategy, segments: Segments) -> tuple[list[int], list[int], list[int]]:
    """Token ids, positions and mask groups of all segments in a row, chunks at overlapping positions."""
    system, chunks, question = segments
    start = len(system)
    ids, positions, groups = list(system), list(range(start)), [SYSTEM] * start
    for index, chunk in enumerate(chunks):
        ids += chunk
        positions += range(start, start + len(chunk))
        groups += [index] * len(chunk)
    _, first = chunk_places(strategy, start, chunks)
    ids += question
    positions += range(first, first + len(question))
    groups += [TAIL] * len(question)
    return ids, positions, groups


def chunk_places(strategy: Strategy, start: int, chunks: Sequence[Sequence[int]]) -> tuple[list[int], int]:
    """Positions of each chunk's first token and of the question's."""
    *places, end = running_offsets(start, chunks)
    if strategy == "shared":
        return [start] * len(chunks), start + max(map(len, chunks), default=0)
    if strategy == "parallel":
        return [start] * len(chunks), end
    return [max(place, end - window_of(strategy, chunks)) for place in places], end


def window_of(strategy: Strategy, chunks: Sequence[Sequence[int]]) -> int:
    """The window of `window-N`, at least as long as each chunk; in all others, all tokens are within it."""
    name, _, number = strategy.partition("-")
    return max(int(number), *map(len, chunks)) if name == "window" and number else 1 << 30


def running_offsets(start: int, chunks: Sequence[Sequence[int]]) -> list[int]:
    """Place of each chunk in a row from `start` on, and the place after the last chunk."""
    return list(accumulate(map(len, chunks), initial=start))


def mask(query_groups: Sequence[int], key_groups: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """The additive mask [1, 1, queries, keys]; queries are the last of the keys' tokens."""
    queries, keys = torch.tensor(query_groups), torch.tensor(key_groups)
    places = torch.arange(len(keys))
    causal = places[None, :] <= places[len(keys) - len(queries) :, None]
    visible = ((keys[None, :] == SYSTEM) | (keys[None, :] == queries[:, None]) | (queries[:, None] == TAIL)) & causal
    return torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, float("-inf"))[None, None]


def window_mask(rows: torch.Tensor, window: int) -> torch.Tensor:
    """Mask of all but the last `window` tokens, including a query's own, for the queries of `rows`."""
    queries, keys = rows.shape[-2:]
    places = torch.arange(keys)
    hidden = places[None, :] <= places[keys - queries :, None] - window
    return torch.zeros_like(rows).masked_fill(hidden, float("-inf"))
