# SPDX-License-Identifier: Apache-2.0
"""Answers over chunks, compared with the oracle."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.engine.server import TesseraServer, token_logprobs
from tests.oracle import Oracle

STEPS = 8
QWEN3, LLAMA_MHA, QWEN3_MHA = (
    pytest.param(name, marks=pytest.mark.matrix) for name in ("tiny-qwen3", "tiny-llama-mha", "tiny-qwen3-mha")
)
STRATEGIES = ["shared", "parallel", "offset"]
ONE_OF_STRATEGIES = [*(pytest.param(each, marks=pytest.mark.matrix) for each in STRATEGIES[:2]), STRATEGIES[2]]
"""In `make test`, the default one: `test_every_order_of_four` has all of them there."""


# Two line feeds follow a chunk's text, and one byte is one token: a chunk of n tokens has n - 2 characters.
SUFFIX = 2
LAYER = 1
PROBED = ("--chunk-probe-layers", str(LAYER), "--block-size", "32")
"""Flags of a server whose choice of chunks and windows is the oracle's: by the attention of one layer."""
Text = Callable[[int], str]


def ask(server: TesseraServer, strategy: str, chunks: list[str], question: str, **fields: Any) -> dict[str, Any]:
    cache = {"position_strategy": strategy, "explain": True, **fields.pop("cache", {})}
    body = {"system": "You answer from documents.", "chunks": chunks, "question": question, "max_tokens": STEPS}
    body |= {"temperature": 0, "ignore_eos": True, "logprobs": True, "top_logprobs": 0, "return_token_ids": True}
    return server.chat(**{**body, **fields}, cache=cache)


def segments(report: dict[str, Any]) -> tuple[list[int], list[list[int]], list[int]]:
    """System segment, chunks, and the question with what is read again before it."""
    kinds = [segment["kind"] for segment in report["segments"]]
    num_again = kinds.count("reread")
    assert kinds == ["system", *["chunk"] * (len(kinds) - 2 - num_again), *["reread"] * num_again, "question"]
    ids = [segment["token_ids"] for segment in report["segments"]]
    end = len(ids) - 1 - num_again
    return ids[0], ids[1:end], [token for each in ids[end:] for token in each]


def assert_exact(
    response: dict[str, Any], oracle: Oracle, strategy: str, tolerance: float = 1e-4, steps: int = STEPS
) -> list[float]:
    """Asserts that log probabilities equal the oracle's, and that the tokens are the oracle's greedy choice.

    Returns the log probabilities' differences.
    """
    report = response["cache"]
    assert report["mode"] == "chunked", report
    tokens = report["tokens"]
    assert tokens["reused"] + tokens["computed"] + tokens.get("left_out", 0) == tokens["prompt"]
    tokens = response["choices"][0]["token_ids"]
    assert len(tokens) == steps
    assert ("opening" in report) == (report["scope"] == "isolated")
    kept = kept_of(report) if "left_out" in report["tokens"] else None
    options = {"kept": kept, "contexts": contexts_of(report)}
    expected = oracle.score(strategy, segments(report), tokens, report.get("opening"), windows_of(report), **options)
    differences = [abs(a - b) for a, b in zip(token_logprobs(response), expected.logprobs, strict=True)]
    assert max(differences) <= tolerance, differences
    best = expected.distributions.max(dim=-1).values.tolist()
    # The engine may rate one token too high and another too low, each by the tolerance.
    assert all(b - a <= 2 * tolerance for a, b in zip(expected.logprobs, best, strict=True)), "not the greedy tokens"
    return differences


def assert_scored(response: dict[str, Any], oracle: Oracle, strategy: str = "full", tolerance: float = 1e-4) -> None:
    """Asserts that log probabilities equal the oracle's for the same tokens: by default in full attention."""
    tokens = response["choices"][0]["token_ids"]
    expected = oracle.score(strategy, segments(response["cache"]), tokens)
    assert token_logprobs(response) == pytest.approx(expected.logprobs, abs=tolerance)


def kept_of(report: dict[str, Any]) -> list[int]:
    return [index for index, chunk in enumerate(report["chunks"]) if chunk.get("kept", True)]


def windows_of(report: dict[str, Any]) -> list[list[tuple[int, int]]] | None:
    """The windows computed anew of each chunk that is kept."""
    windows = [chunk.get("recomputed", []) for chunk in report["chunks"] if chunk.get("kept", True)]
    return windows if any(windows) else None


def contexts_of(report: dict[str, Any]) -> list[list[int]] | None:
    """The tokens that each chunk was computed behind, besides the system segment."""
    contexts = [segment.get("context", []) for segment in report["segments"] if segment["kind"] == "chunk"]
    return contexts if any(contexts) else None


def statuses(response: dict[str, Any]) -> list[str]:
    return [chunk["status"] for chunk in response["cache"]["chunks"]]


def full_attention(server: TesseraServer, chunks: list[str], question: str, reason: str) -> dict[str, Any]:
    assert reason in server.client.get("/v1/cache/stats").json()["reason"]
    response = ask(server, "shared", chunks, question)
    report = response["cache"]
    assert report["mode"] == "full"
    assert reason in report["reason"]
    assert [chunk["status"] for chunk in report["chunks"]] == [None] * len(chunks)
    return response


def blank_question(server: TesseraServer) -> list[int]:
    """The tokens of the question without content."""
    asked = {"chunks": ["a"], "question": "N/A", "max_tokens": 1, "cache": {"explain": True, "recompute": 0}}
    return segments(server.post("/v1/rag/chat", asked)["cache"])[2]


def attention(
    server: TesseraServer, oracle: Oracle, report: dict[str, Any], strategy: str = "offset"
) -> list[list[float]]:
    """The question's attention to each token of each chunk of a report, less that of one without content.

    Needs a server with :data:`PROBED`.
    """
    system, chunks, question = segments(report)
    paid, at_least = (
        oracle.attention(strategy, (system, chunks, each), [LAYER], report.get("opening"))
        for each in (question, blank_question(server))
    )
    return [[a - b for a, b in zip(*each, strict=True)] for each in zip(paid, at_least, strict=True)]


def assert_filled_hit_and_mixed_are_exact(
    server: TesseraServer, oracle: Oracle, text: Text, steps: int = STEPS
) -> None:
    for strategy in STRATEGIES:
        system, a, b, c = text(20), text(200), text(37), text(64)
        for chunks, expected in (([a, b], ["filled", "filled"]), ([b, a], ["hit", "hit"]), ([c, a], ["filled", "hit"])):
            response = ask(server, strategy, chunks, text(15), system=system, max_tokens=steps)
            assert statuses(response) == expected
            assert_exact(response, oracle, strategy, steps=steps)
