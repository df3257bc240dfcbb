# SPDX-License-Identifier: Apache-2.0
"""Accuracy by the temperature of attention to the chunks, in plain transformers, beside the control.

Each question is answered greedily in full attention and with composed chunks (``offset``), at each temperature. The
control is full attention with the same temperature: the question and the answer attend to all chunks with it, as
they do to composed chunks. What the chunks' own tokens see is the same at every temperature.

    python scripts/measure_temperature.py ~/.cache/tessera/models/SmolLM2-135M-Instruct results.jsonl --limit 400
    python scripts/measure_temperature.py --table results.jsonl
    python scripts/measure_temperature.py adapted adapted.jsonl --temperatures 1 --contexts full offset parallel
    python scripts/measure_temperature.py --table adapted.jsonl --against results.jsonl

An interrupted run goes on where it was. Models: one kind of RoPE for each kind of layer, without scaling.
"""

import argparse
import json
import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from cache.positions.layout import ChunkedPrompt
from measuring.kit.statistics import mean_interval
from measuring.quality.client import LEAD
from measuring.quality.metrics import score
from measuring.quality.questions.plain_english import plain_questions
from measuring.quality.questions.questions import Question
from training.adapt.material import Task, Template

CONTEXTS: Final = ("full", "offset")
"""Contexts by default; ``parallel`` is another one."""
_MASKED: Final = torch.finfo(torch.float32).min
KeysAndValues = list[tuple[Tensor, Tensor]]
"""K and V of each layer, ``[rows, KV heads, tokens, head size]``."""


def tempered(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, scaling: float, **given: Any
) -> tuple[Tensor, None]:
    """Attention with the temperature ``given["temperatures"][row]`` for the keys of ``given["context"]``, if any.

    Their logits are divided by it, and their log-sum-exp is multiplied by it (APE, arXiv 2502.05431, scale 1).
    """
    if given.get("context") is None:
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, scaling=scaling)  # type: ignore[no-any-return]
    rows, heads, tokens, size = query.shape
    kv_heads, length = key.shape[1:3]
    grouped = query.reshape(rows, kv_heads, -1, size)
    logits = (grouped @ key.transpose(2, 3)).float().view(rows, heads, tokens, length) * scaling + attention_mask
    context, temperatures = given["context"], given["temperatures"][:, None, None, None]
    part = logits[..., context] / temperatures
    total = part.logsumexp(-1, keepdim=True).clamp(min=_MASKED)  # a window may hide the whole context
    logits[..., context] = part + (temperatures - 1) * total
    weights = logits.softmax(-1).to(value.dtype).view(rows, kv_heads, -1, length)
    return (weights @ value).view(rows, heads, tokens, size).transpose(1, 2), None


ALL_ATTENTION_FUNCTIONS.register("rows_tempered", tempered)


class Reader:
    """A model that reads prompts both ways and answers in rows: each context at each temperature."""

    def __init__(self, folder: Path, temperatures: Sequence[float], contexts: Sequence[str] = CONTEXTS) -> None:
        self._contexts = contexts
        self.tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self._template = Template(self.tokenizer)
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="rows_tempered", local_files_only=True
        ).eval()
        ends = self._model.generation_config.eos_token_id
        self._ends = set(ends if isinstance(ends, list) else [ends])
        config = self._model.config
        self._layer_types = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
        self._window = config.sliding_window if "sliding_attention" in self._layer_types else None
        self._temperatures = torch.tensor([*temperatures] * len(contexts))
        self._chunks: dict[tuple[int, ...], KeysAndValues] = {}

    def prompt(self, question: Question) -> ChunkedPrompt:
        """The question's segments, as the server makes them."""
        asked = self._template.branch(question.system, Task(question.question, "")).question
        return replace(self._template.prompt(question.system, question.chunks), question=asked)

    @torch.inference_mode()
    def answers(self, question: Question, max_tokens: int) -> list[tuple[str, float | None]]:
        """Each row's greedy answer, and the log probability of the right one behind :data:`LEAD`."""
        prompt = self.prompt(question)
        rows = len(self._temperatures) // len(self._contexts)
        contexts = (self._read(prompt) if way == "full" else self._composed(prompt, way) for way in self._contexts)
        cache = DynamicCache()
        for layer, pairs in enumerate(zip(*contexts, strict=True)):
            keys, values = (
                torch.cat([each.expand(rows, -1, -1, -1) for each in kind]) for kind in zip(*pairs, strict=True)
            )
            cache.update(keys, values, layer)
        context = slice(len(prompt.system), cache.get_seq_length())
        if prompt.question[:-1]:
            self._forward(prompt.question[:-1], cache, context)
        before = cache.get_seq_length()
        last = [prompt.question[-1]] * len(self._temperatures)
        logprobs = self._logprobs(question, last, cache, context)
        cache.crop(before - cache.get_seq_length())
        return list(zip(self._decode(last, cache, context, max_tokens), logprobs, strict=True))

    def _logprobs(self, question: Question, last: list[int], cache: Any, context: slice) -> list[float | None]:
        if not question.answers:
            return [None] * len(last)
        lead, forced = self._ids(LEAD), self._ids(f"{LEAD} {question.answers[0]}")
        begin = next(i for i, token in enumerate(forced) if token not in lead[i : i + 1])
        logits = self._forward([last[0], *forced[:-1]], cache, context, keep=len(forced))
        told = logits.float().log_softmax(-1)[:, range(begin, len(forced)), forced[begin:]]
        return [float(each) for each in told.sum(-1)]

    def _decode(self, last: list[int], cache: Any, context: slice, max_tokens: int) -> list[str]:
        told: list[list[int]] = [[] for _ in last]
        open_rows = set(range(len(last)))
        for _ in range(max_tokens):
            chosen = self._forward([[token] for token in last], cache, context)[:, -1].argmax(-1).tolist()
            for row in sorted(open_rows):
                if chosen[row] in self._ends:
                    open_rows.discard(row)
                else:
                    told[row].append(chosen[row])
            if not open_rows:
                break
            last = chosen
        return [self.tokenizer.decode(tokens, skip_special_tokens=True) for tokens in told]

    def _read(self, prompt: ChunkedPrompt) -> KeysAndValues:
        """The context in full attention."""
        return self._computed(prompt.token_ids[: prompt.num_context_tokens])

    def _composed(self, prompt: ChunkedPrompt, way: str) -> KeysAndValues:
        """The context of chunks, each computed behind the system segment; ``offset`` moves them to their places."""
        start = at = len(prompt.system)
        parts = [self._remembered(prompt.system)]
        for chunk in prompt.chunks:
            computed = self._remembered([*prompt.system, *chunk.token_ids])
            cut = [(keys[:, :, start:], values[:, :, start:]) for keys, values in computed]
            parts.append(self._moved(cut, at - start) if way == "offset" else cut)
            at += chunk.num_tokens
        return [tuple(torch.cat(kind, 2) for kind in zip(*layer, strict=True)) for layer in zip(*parts, strict=True)]

    def _remembered(self, ids: Sequence[int]) -> KeysAndValues:
        if (found := self._chunks.get(tuple(ids))) is None:
            found = self._chunks[tuple(ids)] = self._computed(ids)
        return found

    def _computed(self, ids: Sequence[int]) -> KeysAndValues:
        cache = DynamicCache()
        self._forward(ids, cache, None)
        return [(layer.keys, layer.values) for layer in cache.layers]

    def _moved(self, part: KeysAndValues, distance: int) -> KeysAndValues:
        """The part with its keys turned by ``distance`` positions."""
        return [
            (apply_rotary_pos_emb(keys, keys, *self._angles(distance, layer))[0], values)
            for (keys, values), layer in zip(part, self._layer_types, strict=True)
        ]

    def _angles(self, distance: int, layer_type: str) -> tuple[Tensor, Tensor]:
        rotary, position = self._model.model.rotary_emb, torch.tensor([[distance]])
        if self._window is None:
            return rotary(torch.zeros(1, dtype=self._model.dtype), position)  # type: ignore[no-any-return]
        return rotary(torch.zeros(1, dtype=self._model.dtype), position, layer_type)  # type: ignore[no-any-return]

    def _forward(self, ids: Sequence[Any], cache: Any, context: slice | None, keep: int = 1) -> Tensor:
        """Logits ``[rows, keep, vocabulary]``; the tokens ``ids`` are those of all rows, or a list for each."""
        seen = cache.get_seq_length()
        rows = 1 if context is None else len(self._temperatures)
        tokens = torch.tensor(ids).reshape(-1, len(ids) if not isinstance(ids[0], list) else 1).expand(rows, -1)
        positions = torch.arange(seen, seen + tokens.shape[1])
        given = {} if context is None else {"context": context, "temperatures": self._temperatures}
        found = self._model(
            input_ids=tokens,
            position_ids=positions[None],
            past_key_values=cache,
            attention_mask=self._masks(positions),
            logits_to_keep=keep,
            **given,
        )
        return found.logits  # type: ignore[no-any-return]

    def _masks(self, positions: Tensor) -> Any:
        distances = positions[:, None] - torch.arange(int(positions[-1]) + 1)
        causal = torch.zeros(distances.shape).masked_fill(distances < 0, _MASKED)[None, None]
        if self._window is None:
            return causal
        return {"full_attention": causal, "sliding_attention": causal.masked_fill(distances >= self._window, _MASKED)}

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)  # type: ignore[no-any-return]


def measure(
    folder: Path, output: Path, limit: int, temperatures: Sequence[float], contexts: Sequence[str], max_tokens: int
) -> None:
    """Appends a line to ``output`` for each question: accuracy and log probability of each row."""
    done = {each["id"] for each in read_lines([output])} if output.exists() else set()
    reader = Reader(folder, temperatures, contexts)
    names = [f"{context} {temperature:g}" for context in contexts for temperature in temperatures]
    questions = plain_questions(limit)
    random.Random("temperature").shuffle(questions)  # an interrupted run has all numbers of chunks
    with output.open("a") as file:
        for number, question in enumerate(questions, start=1):
            if question.id in done:
                continue
            answers = reader.answers(question, max_tokens)
            rows = {
                name: {"answer": text, "accuracy": score(text, question.answers).accuracy, "logprob": logprob}
                for name, (text, logprob) in zip(names, answers, strict=True)
            }
            print(json.dumps({"id": question.id, "chunks": len(question.chunks), "rows": rows}), file=file, flush=True)
            print(f"\r{number} of {len(questions)}", end="", flush=True)


def table(paths: Iterable[Path]) -> None:
    """Prints what each temperature gives composed chunks, full attention, and the former beyond the latter.

    Accuracy in points and log probability of the right answer in nats, with 95 % intervals of paired questions.
    """
    for chunks, lines in _by_chunks((line["chunks"], line["rows"]) for line in read_lines(paths)):
        means = {way: 100 * sum(rows[f"{way} 1"]["accuracy"] for rows in lines) / len(lines) for way in CONTEXTS}
        print(f"{chunks} chunks, {len(lines)} questions: " + ", ".join(f"{w} {m:.1f} %" for w, m in means.items()))
        for temperature in dict.fromkeys(name.partition(" ")[2] for name in lines[0] if not name.endswith(" 1")):
            for measure, factor, unit in (("accuracy", 100, "points"), ("logprob", 1, "nats")):
                known = [rows for rows in lines if rows["full 1"][measure] is not None]
                gains = {}
                for way in CONTEXTS:
                    pairs = [(rows[f"{way} {temperature}"], rows[f"{way} 1"]) for rows in known]
                    gains[way] = [factor * (one[measure] - other[measure]) for one, other in pairs]
                gains["beyond"] = [one - other for one, other in zip(gains["offset"], gains["full"], strict=True)]
                told = (f"{way} {interval(each)}" for way, each in gains.items())
                print(f"  {temperature}, {unit}: " + ", ".join(told))


def against(paths: Iterable[Path], original: Path) -> None:
    """Prints how far answers are from full attention of the original model, on the same questions."""
    full = {line["id"]: line["rows"]["full 1"] for line in read_lines([original])}
    found = ((line["chunks"], (line["rows"], full.get(line["id"]))) for line in read_lines(paths))
    for chunks, pairs in _by_chunks(each for each in found if each[1][1] is not None):
        print(f"{chunks} chunks, {len(pairs)} questions")
        for name in pairs[0][0]:
            points = [100 * (rows[name]["accuracy"] - base["accuracy"]) for rows, base in pairs]
            nats = [rows[name]["logprob"] - base["logprob"] for rows, base in pairs if base["logprob"] is not None]
            print(f"  {name}: {interval(points)} points, {interval(nats)} nats")


def _by_chunks(numbered: Iterable[tuple[int, Any]]) -> list[tuple[str, list[Any]]]:
    """Items by their number of chunks, in order, and all of them."""
    groups = defaultdict(list)
    for chunks, item in numbered:
        groups[chunks].append(item)
    everything = [item for items in groups.values() for item in items]
    return [*((str(chunks), items) for chunks, items in sorted(groups.items())), ("all", everything)]


def interval(values: Sequence[float]) -> str:
    """The mean with its 95 % interval."""
    low, high = mean_interval(values, 0.95)
    return f"{sum(values) / len(values):+.2f} ({low:+.2f} to {high:+.2f})"


def read_lines(paths: Iterable[Path]) -> Iterator[dict[str, Any]]:
    """The records of JSONL files."""
    for path in paths:
        yield from map(json.loads, path.read_text().splitlines())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("model", nargs="?", type=Path, help="folder of the model")
    parser.add_argument("output", nargs="?", type=Path, help="file of results, a line for each question")
    parser.add_argument("--limit", type=int, default=400, help="questions for each number of chunks (default: 400)")
    parser.add_argument("--temperatures", type=float, nargs="+", default=(1.0, 0.9), help="the first must be 1")
    ways = ("full", "offset", "parallel")
    parser.add_argument("--contexts", nargs="+", choices=ways, default=CONTEXTS, help="contexts (default: full offset)")
    parser.add_argument("--max-tokens", type=int, default=32, help="longest answer (default: 32)")
    parser.add_argument("--threads", type=int, default=2, help="threads (default: 2)")
    parser.add_argument("--table", type=Path, nargs="+", metavar="FILE", help="print the table of these results")
    parser.add_argument("--against", type=Path, metavar="FILE", help="with --table: results of the original model")
    args = parser.parse_args()
    if args.table:
        against(args.table, args.against) if args.against else table(args.table)
        return
    torch.set_num_threads(args.threads)
    measure(args.model, args.output, args.limit, args.temperatures, args.contexts, args.max_tokens)


if __name__ == "__main__":
    main()
