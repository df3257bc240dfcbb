# SPDX-License-Identifier: Apache-2.0
"""Time to first token over HTTP: stock full prefill, chunks missing, chunks cached, and vLLM's exact repeat.

Two servers of the same model with the same flags run side by side, Tessera with the cache off (stock vLLM) and on;
the four kinds of request are interleaved round by round, so that noise of the machine meets all of them. Before
anything is reported, answers are compared: an exact repeat must answer like the request it repeats, and a cached
request must answer like the same request with its chunks just filled.
"""

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.random_model import build_preset
from app.server_process import ServerProcess

KINDS = ("stock full prefill", "all chunks missing", "all chunks cached", "exact repeat (vLLM)")


@dataclass(frozen=True)
class Bound:
    """What a ratio has to be at least, or at most, at the default sizes."""

    ratio: str
    at_least: float = 0.0
    at_most: float = float("inf")

    def holds(self, ratios: dict[str, float]) -> bool:
        return self.at_least <= ratios[self.ratio] <= self.at_most

    @property
    def words(self) -> str:
        return f"at least {self.at_least:g}" if self.at_least else f"at most {self.at_most:g}"


BOUNDS = (
    Bound("stock / cached", at_least=25),
    Bound("cached / exact repeat", at_most=1.1),
    Bound("missing / stock", at_most=1.1),
)


class Workload:
    """Requests of `system + chunks + question` tokens for a byte-level model: one ASCII character is one token."""

    def __init__(self, system: int, chunks: int, chunk_tokens: int, question: int, seed: int) -> None:
        self._random = random.Random(seed)
        self._sizes = (system, chunks, chunk_tokens, question)
        self.system = self._text(system)

    def chunks(self) -> list[str]:
        """New chunks; each gets two line feeds from the server."""
        return [self._text(self._sizes[2] - 2) for _ in range(self._sizes[1])]

    def question(self) -> str:
        return self._text(self._sizes[3])

    def shuffled(self, chunks: list[str]) -> list[str]:
        """Another order (with more than one chunk)."""
        order = chunks
        while order == chunks and len(chunks) > 1:
            order = self._random.sample(chunks, len(chunks))
        return order

    def _text(self, length: int) -> str:
        return "".join(self._random.choices("abcdefghijklmnopqrstuvwxyz ", k=length - 1)) + "x"


def first_token_s(server: ServerProcess, body: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    """Seconds from sending the request to the first content event, and the answer's text and cache report."""
    body = {**body, "stream": True, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    first, text, report = None, "", {}
    started = time.perf_counter()
    with server.client.stream("POST", "/v1/rag/chat", json=body) as response:
        if response.status_code != 200:
            raise SystemExit(f"benchmark: server answered {response.status_code}: {response.read().decode()}")
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            content = "".join(choice["delta"].get("content") or "" for choice in event.get("choices", ()))
            if content and first is None:
                first = time.perf_counter() - started
            text += content
            report = event.get("cache") or report
    if first is None:
        raise SystemExit("benchmark: no token arrived")
    return first, {"text": text, **report}


def run_round(stock: ServerProcess, tessera: ServerProcess, workload: Workload) -> dict[str, float]:
    """One measurement of each kind, on chunks and questions never seen before."""
    chunks, question = workload.chunks(), workload.question()
    body = {"system": workload.system, "chunks": chunks, "question": question}
    times = {}
    times[KINDS[0]], full = first_token_s(stock, body)
    expect(full, mode="full")
    times[KINDS[3]], repeat = first_token_s(stock, body)
    if repeat["text"] != full["text"]:
        raise SystemExit("benchmark: the exact repeat answered differently; not reporting")
    times[KINDS[1]], filled = first_token_s(tessera, body)
    expect(filled, mode="chunked", status="filled")
    other = {**body, "chunks": workload.shuffled(chunks), "question": workload.question()}
    times[KINDS[2]], cached = first_token_s(tessera, other)
    expect(cached, mode="chunked", status="hit")
    check_answers(tessera, body, filled)
    return times


def check_answers(tessera: ServerProcess, body: dict[str, Any], filled: dict[str, Any]) -> None:
    """The same layout again, its chunks now cached, must give the same tokens."""
    _, again = first_token_s(tessera, body)
    if again["text"] != filled["text"]:
        raise SystemExit("benchmark: cached and just-filled chunks answered differently; not reporting")


def expect(report: dict[str, Any], mode: str, status: str | None = None) -> None:
    """Stops unless the request ran as its kind says."""
    statuses = {chunk["status"] for chunk in report["chunks"]}
    if report["mode"] != mode or (status and statuses != {status}):
        raise SystemExit(f"benchmark: ran as {report['mode']} {statuses} ({report['reason']}); not reporting")


@contextmanager
def servers(model: str, flags: list[str]) -> Iterator[tuple[ServerProcess, ServerProcess]]:
    """Stock and Tessera on the same model with the same flags."""
    # Unless told otherwise vLLM reserves one core, and two beside a KV connector: not the same engine on both sides.
    all_cores = {"VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}", **os.environ}
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        started = []
        for name, extra in (("stock", ["--no-chunk-cache"]), ("tessera", [])):
            print(f"starting {name} …", file=sys.stderr, flush=True)
            server = ServerProcess(Path(folder) / f"{name}.log", model, *flags, *extra, environment=all_cores)
            stack.callback(server.stop)
            started.append(server.wait_ready())
        yield started[0], started[1]


def summarize(rounds: list[dict[str, float]]) -> dict[str, Any]:
    """Medians in seconds, and medians of the ratios taken within each round."""

    def ratio(a: str, b: str) -> float:
        return statistics.median(times[a] / times[b] for times in rounds)

    stock, missing, cached, repeat = KINDS
    return {
        "median_s": {kind: statistics.median(times[kind] for times in rounds) for kind in KINDS},
        "ratios": {
            "stock / cached": ratio(stock, cached),
            "cached / exact repeat": ratio(cached, repeat),
            "missing / stock": ratio(missing, stock),
        },
        "rounds": len(rounds),
    }


def print_table(summary: dict[str, Any]) -> None:
    print(f"time to first token, median of {summary['rounds']} interleaved rounds")
    for kind, seconds in summary["median_s"].items():
        print(f"  {kind:22} {seconds * 1e3:9.1f} ms")
    for bound in BOUNDS:
        verdict = "ok" if bound.holds(summary["ratios"]) else "MISSED"
        print(f"  {bound.ratio:22} {summary['ratios'][bound.ratio]:9.2f}      {bound.words}: {verdict}")


def main() -> int:
    """Runs the benchmark; the summary is printed, and written as JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="model folder (default: a random model of about 100 M parameters)")
    parser.add_argument("--rounds", type=int, default=7, help="interleaved rounds (default: 7)")
    parser.add_argument("--system", type=int, default=64, help="tokens of the system prompt (default: 64)")
    parser.add_argument("--chunks", type=int, default=8, help="number of chunks (default: 8)")
    parser.add_argument("--chunk-tokens", type=int, default=512, help="tokens of each chunk (default: 512)")
    parser.add_argument("--question", type=int, default=32, help="tokens of the question (default: 32)")
    parser.add_argument("--json", type=Path, help="file for the summary")
    parser.add_argument("--seed", type=int, default=0)
    args, flags = parser.parse_known_args()
    model = args.model or str(build_preset("bench-100m"))
    flags = ["--dtype", "float32", "--max-model-len", "16384", *flags]
    workload = Workload(args.system, args.chunks, args.chunk_tokens, args.question, args.seed)
    rounds = []
    with servers(model, flags) as (stock, tessera):
        for i in range(args.rounds + 1):
            times = run_round(stock, tessera, workload)
            print(f"round {i} of {args.rounds}" + (" (warm-up)" if i == 0 else ""), file=sys.stderr, flush=True)
            rounds += [times] if i else []
    summary = summarize(rounds)
    print_table(summary)
    if args.json:
        args.json.write_text(json.dumps(summary, indent=1) + "\n")
    return 0 if all(bound.holds(summary["ratios"]) for bound in BOUNDS) else 1


if __name__ == "__main__":
    sys.exit(main())
