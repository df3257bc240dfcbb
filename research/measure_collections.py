# SPDX-License-Identifier: Apache-2.0
"""Measures a collection on a running server: recall, and the time to the first token beside full attention.

    tessera ingest FOLDER --collection policy --system "Answer from the documents."
    python research/measure_collections.py policy research/debian_policy_questions.json --server URL

The questions are about Debian's policy manual (package debian-policy, version 4.6.2.0, its folder policy.html). A
question's passage is found if one of those retrieved has its phrase, white space and code marks aside.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import httpx

from machine.http_client import http_client


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("collection")
    parser.add_argument("questions", type=Path, help="JSON: a list of [question, phrase of the passage]")
    parser.add_argument("--server", default="http://127.0.0.1:8000")
    parser.add_argument("--top-k", type=int, default=8)
    args = parser.parse_args()
    num_found, times = 0, dict[str, list[float]](auto=[], full=[])
    with http_client(args.server, timeout=None) as client:
        for question, phrase in json.loads(args.questions.read_text()):
            retrieved, seconds = list[Any](), dict[str, float]()
            for mode, all_times in times.items():
                retrieved, seconds[mode] = ask(client, args, question, mode)
                all_times.append(seconds[mode])
            found = any(bare(phrase) in bare(text(client, args.collection, each)) for each in retrieved)
            num_found += found
            times_ms = ", ".join(f"{mode} {1e3 * each:.0f} ms" for mode, each in seconds.items())
            print(f"{'found' if found else 'NOT FOUND'}; {times_ms}; {question}", flush=True)
    ratio = statistics.median(full / reused for reused, full in zip(times["auto"], times["full"], strict=True))
    reused_ms, full_ms = (1e3 * statistics.median(each) for each in times.values())
    print(f"{num_found} of {len(times['full'])} found")
    print(f"to the first token: reused {reused_ms:.0f} ms, full attention {full_ms:.0f} ms, {ratio:.1f} times as long")


def ask(client: httpx.Client, args: argparse.Namespace, question: str, mode: str) -> tuple[list[Any], float]:
    """Passages and seconds to the first token of an answer."""
    body = {
        "retrieve": {"collection": args.collection, "top_k": args.top_k},
        "question": question,
        "max_tokens": 16,
        "temperature": 0,
        "stream": True,
        "cache": {"mode": mode},
    }
    started, first = time.perf_counter(), None
    report: dict[str, Any] = {}
    with client.stream("POST", "/v1/rag/chat", json=body) as answer:
        if answer.is_error:
            raise SystemExit(answer.read().decode())
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if first is None and any(choice["delta"].get("content") for choice in event.get("choices", ())):
                first = time.perf_counter() - started
            report = event.get("cache") or report
    if first is None:
        raise SystemExit(f"no token in the answer to {question!r}")
    return report["retrieved"], first


def text(client: httpx.Client, collection: str, passage: dict[str, Any]) -> str:
    """A passage's text."""
    listed = client.get(f"/v1/rag/collections/{collection}/passages", params={"file": passage["file"]}).json()
    return next(str(each["text"]) for each in listed["data"] if each["id"] == passage["id"])


def bare(words: str) -> str:
    """Text without code marks and emphasis, in one line and case."""
    return " ".join(words.replace("`", "").replace("*", "").replace("\\", "").split()).lower()


if __name__ == "__main__":
    main()
