# SPDX-License-Identifier: Apache-2.0
"""Two replicas behind a router, against round robin and against one replica with both pools' memory: all of them real.

    python -m benchmarks.cluster_served

Questions about topics of Zipf's popularity, each with the documents of its topic in any order; the caches are empty at
the start. Every answer is compared with that of the one replica: same tokens, log probabilities within 1e-4.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

import httpx
from rich.console import Console
from rich.progress import track

from benchmarks.texts import Texts
from tools.progress import say
from tools.random_model import build_preset
from tools.redis_process import NoRedisError, local_redis
from tools.server_process import ServerProcess

AGAINST_ROUND_ROBIN_AT_LEAST: Final = 1.5
OF_ONE_REPLICA_AT_LEAST: Final = 0.95
DOCUMENTS_OF_TOPIC: Final = 3
PAGE_TOKENS: Final = 16
DOCUMENT_TOKENS: Final = 160
TOKEN_BYTES: Final = 4096
"""Of tiny-llama's KV: 2 x 4 layers x 2 heads x 64 x 4 bytes."""
_CLIENTS = 2
_TOLERANCE = 1e-4
_FLAGS = ("--dtype", "float32", "--enforce-eager", "--kv-cache-memory-bytes", "256M", "--max-model-len", "4096")
_ROUTE = ("app.cli", "route")


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests as their bodies, in order."""

    bodies: list[dict[str, Any]]
    pages: int
    """Pages of the pool that all documents take together."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a request came to: its tokens with their log probabilities, and how many of its chunks were there."""

    tokens: list[tuple[str, float]]
    hits: int

    def equals(self, other: "Answer") -> bool:
        """Whether the tokens are the same, within the tolerance."""
        pairs = zip(self.tokens, other.tokens, strict=True)
        return all(mine == its and abs(a - b) <= _TOLERANCE for (mine, a), (its, b) in pairs)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints; 1 if a claim does not hold or an answer differs, 2 without a Redis."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=800, help="of each run (default: %(default)s)")
    parser.add_argument("--topics", type=int, default=120, help="of three documents each (default: %(default)s)")
    parser.add_argument("--skew", type=float, default=0.6, help="Zipf's exponent (default: %(default)s)")
    parser.add_argument("--share", type=float, default=0.25, help="of the documents in a pool (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    trace = make_trace(args.topics, args.requests, args.skew, args.seed)
    try:
        answers = run(trace, int(args.share * trace.pages))
    except NoRedisError as error:
        say(str(error))
        return 2
    wanted = DOCUMENTS_OF_TOPIC * args.requests
    rates = {name: sum(answer.hits for answer in each) / wanted for name, each in answers.items()}
    for name, rate in rates.items():
        say(f"{name}: {rate:.1%} of {wanted} documents found")
    wrong = sum(
        not mine.equals(one) for name in answers for mine, one in zip(answers[name], answers["one"], strict=True)
    )
    say(f"answers that differ from those of one replica: {wrong} of {2 * args.requests}")
    held = [
        _claim("routed / round robin", rates["routed"] / rates["round robin"], AGAINST_ROUND_ROBIN_AT_LEAST),
        _claim("routed / one replica", rates["routed"] / rates["one"], OF_ONE_REPLICA_AT_LEAST),
    ]
    print(json.dumps({**vars(args), "hit_rates": rates, "wrong": wrong}))
    return int(wrong > 0 or not all(held))


def make_trace(topics: int, requests: int, skew: float, seed: int) -> Trace:
    """Every document is as long as every other; for a byte-level model one character is one token."""
    rng = random.Random(seed)
    source = Texts(f"cluster-{seed}")
    texts = [source.chunks(DOCUMENTS_OF_TOPIC, DOCUMENT_TOKENS) for _ in range(topics)]
    asked = rng.choices(range(topics), [1 / (rank + 1) ** skew for rank in range(topics)], k=requests)
    bodies = [_body(rng.sample(texts[topic], DOCUMENTS_OF_TOPIC)) for topic in asked]
    return Trace(bodies, topics * DOCUMENTS_OF_TOPIC * (DOCUMENT_TOKENS // PAGE_TOKENS))


def run(trace: Trace, pages: int) -> dict[str, list[Answer]]:
    """Every request's answer, by who gave it. A pool has ``pages`` pages, and that of the one replica twice as many."""
    answers = {}
    with _replicas(2, pages) as (replicas, router):
        answers["routed"] = _ask(trace, "routed", lambda _: router)
        for replica in replicas:
            replica.client.post("/v1/cache/clear").raise_for_status()
        answers["round robin"] = _ask(trace, "round robin", lambda number: replicas[number % 2])
    with _replicas(1, 2 * pages) as ((one,), _):
        answers["one"] = _ask(trace, "one", lambda _: one)
    return answers


@contextmanager
def _replicas(number: int, pages: int) -> Iterator[tuple[list[ServerProcess], ServerProcess]]:
    """Replicas, and a router that knows all of them."""
    model = str(build_preset("tiny-llama"))
    size = (pages + 8) * PAGE_TOKENS * TOKEN_BYTES  # and the system segment
    pool = ("--chunk-cache-memory", str(size), "--chunk-cache-page-tokens", str(PAGE_TOKENS))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        redis = ("--registry", stack.enter_context(local_redis()))
        replicas = [ServerProcess(folder / f"{i}.log", model, *_FLAGS, *pool, *redis) for i in range(number)]
        router = ServerProcess(folder / "router.log", *redis, serve=_ROUTE)
        for process in (*replicas, router):
            stack.callback(process.stop)
        for process in (*replicas, router):
            process.wait_ready()
        while len(router.client.get("/v1/cluster").json()["replicas"]) < number:
            time.sleep(0.1)
        yield replicas, router


def _ask(trace: Trace, name: str, server_of: Callable[[int], ServerProcess]) -> list[Answer]:
    with ThreadPoolExecutor(_CLIENTS) as clients:
        found = clients.map(lambda item: _answer(server_of(item[0]), item[1]), enumerate(trace.bodies))
        return list(track(found, name, total=len(trace.bodies), console=Console(stderr=True)))


def _answer(server: ServerProcess, body: dict[str, Any]) -> Answer:
    response: httpx.Response = server.client.post("/v1/rag/chat", json=body)
    if response.status_code != HTTPStatus.OK:
        raise SystemExit(f"benchmark: {response.status_code}: {response.text}")
    answer = response.json()
    tokens = [(token["token"], token["logprob"]) for token in answer["choices"][0]["logprobs"]["content"]]
    return Answer(tokens, sum(chunk["status"] == "hit" for chunk in answer["cache"]["chunks"]))


def _body(chunks: list[str]) -> dict[str, Any]:
    """A request that fails rather than be answered in full attention."""
    sampling = {"max_tokens": 4, "temperature": 0, "logprobs": True}
    return {"system": "Answer.", "chunks": chunks, "question": "Which?", "cache": {"mode": "chunked"}, **sampling}


def _claim(name: str, value: float, at_least: float) -> bool:
    say(f"{name}, hit rate: {value:.3f}, at least {at_least}: {'holds' if value >= at_least else 'does not hold'}")
    return value >= at_least


if __name__ == "__main__":
    sys.exit(main())
