#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measure the time to first token with windows computed anew and chunks read again, beside full attention, in turn.

    .venv/bin/python research/measure_recompute.py [MODEL] [FLAG ...]

Over eight cached chunks of some 512 tokens, in new orders and with new questions; MODEL defaults to qwen2.5-coder-1.5b.
Prints each way's times in ms by stage, and its ratio to full attention's; then how long measuring the question's
attention took, as a ratio to the whole time over cached chunks.
"""

import statistics
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any, Final

from app.models.default_model import DEFAULT_DTYPE
from app.models.packaged_models import local_model
from machine.http_client import http_client
from machine.server_process import ServerProcess
from measuring.kit.texts import Texts, characters_per_token

ROUNDS, CHUNKS, CHUNK_TOKENS = 6, 8, 512
FULL: Final = "full attention"
CACHED: Final = "as cached"
WAYS: Final[dict[str, dict[str, Any]]] = {
    FULL: {"mode": "full"},
    CACHED: {},
    "15 % anew": {"recompute": 0.15},
    "25 % anew": {"recompute": 0.25},
    "15 % again": {"reread": 0.15},
    "25 % again": {"reread": 0.25},
}
FLAGS: Final = ("--dtype", DEFAULT_DTYPE, "--max-model-len", "8192", "--chunk-mode", "offset")


def main() -> None:
    model = local_model(sys.argv[1] if len(sys.argv) > 1 else "qwen2.5-coder-1.5b")
    texts = Texts("recompute", characters_per_token(Path(model)))
    with tempfile.TemporaryDirectory() as folder:
        server = ServerProcess(Path(folder) / "server.log", model, *FLAGS, *sys.argv[2:])
        try:
            server.wait_ready()
            _measure(server.url, texts)
        finally:
            server.stop()


def _measure(url: str, texts: Texts) -> None:
    client = http_client(url, timeout=600)
    chunks = texts.chunks(CHUNKS, CHUNK_TOKENS)

    def ask(cache: dict[str, Any]) -> dict[str, float]:
        """Milliseconds by stage, each request's own, and the share of the prompt's tokens that were computed."""
        asked = {"system": "Answer.", "chunks": texts.shuffled(chunks), "question": texts.text(24), "max_tokens": 1}
        response = client.post("/v1/rag/chat", json={**asked, "temperature": 0, "cache": cache})
        if response.is_error:
            raise SystemExit(response.text)
        report = response.json()["cache"]
        assert report["mode"] == cache.get("mode", "chunked"), report
        return {**report["timings_ms"], "computed %": 100 * report["tokens"]["computed"] / report["tokens"]["prompt"]}

    seen: dict[str, list[dict[str, float]]] = defaultdict(list)
    for number in range(ROUNDS + 1):
        for way, cache in WAYS.items():
            found = ask(cache)
            if number:  # the first computes the chunks
                seen[way].append(found)
    for way, rounds in seen.items():
        stages = {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
        told = ", ".join(f"{name} {value:.0f}" for name, value in stages.items())
        print(f"{way}: {_ratio(rounds, 'first_token', seen[FULL])}; {told}", flush=True)
    for way, rounds in seen.items():
        if "select" in rounds[0]:
            print(f"measuring for {way}, to {CACHED}: {_ratio(rounds, 'select', seen[CACHED])}", flush=True)


def _ratio(rounds: list[dict[str, float]], stage: str, others: list[dict[str, float]]) -> str:
    """The stage's times as ratios to the others' times to first token, round by round: median and range."""
    ratios = [one[stage] / other["first_token"] for one, other in zip(rounds, others, strict=True)]
    return f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"


if __name__ == "__main__":
    main()
