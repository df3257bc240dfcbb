# SPDX-License-Identifier: Apache-2.0
"""`cache.mode = "compare"`: its report on full attention equals full attention's own answers."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.engine.server import TesseraServer, stream_events
from tests.engine.test_exactness import STRATEGIES, ask, segments

Text = Callable[[int], str]
Probabilities = dict[int, float]

COMPARE = {"mode": "compare"}
ASKED = {"top_logprobs": 20, "return_tokens_as_token_ids": True}


def of_answer(response: dict[str, Any]) -> list[Probabilities]:
    """Probabilities in a chat completion, by token."""

    def known(entry: dict[str, Any]) -> Probabilities:
        every = [entry, *entry["top_logprobs"]]
        return {int(each["token"].removeprefix("token_id:")): math.exp(each["logprob"]) for each in every}

    return [known(entry) for entry in response["choices"][0]["logprobs"]["content"]]


def of_full_attention(server: TesseraServer, prompt: list[int], answer: list[int]) -> list[Probabilities]:
    """Probabilities of each token of ``answer`` behind ``prompt``, by vLLM's own endpoint."""
    body = {"model": server.model, "prompt": [*prompt, *answer], "max_tokens": 1, "prompt_logprobs": 20}
    of_prompt = server.post("/v1/completions", body)["choices"][0]["prompt_logprobs"]
    return [{int(t): math.exp(each["logprob"]) for t, each in step.items()} for step in of_prompt[len(prompt) :]]


def divergence(full: Probabilities, cached: Probabilities) -> float:
    both = sorted(full.keys() & cached.keys())
    p, q = ([side[token] for token in both] for side in (full, cached))
    return sum(a * math.log(a / b) for a, b in zip([*p, 1 - sum(p)], [*q, 1 - sum(q)], strict=True))


def asked_one_by_one(server: TesseraServer, response: dict[str, Any]) -> float:
    """Divergence computed token by token from vLLM's own endpoint."""
    system, chunks, question = segments(response["cache"])
    prompt = [*system, *(token for chunk in chunks for token in chunk), *question]
    of_full = of_full_attention(server, prompt, response["choices"][0]["token_ids"])
    pairs = list(zip(of_full, of_answer(response), strict=True))
    return sum(divergence(full, cached) for full, cached in pairs) / len(pairs)


@pytest.mark.parametrize("cache", [{}, {"link_tokens": 8}], ids=["plain", "linked"])
def test_the_divergence_is_that_of_log_probabilities_asked_for_one_by_one(
    cache: dict[str, Any], server: TesseraServer, oracle: Any, text: Text
) -> None:
    chunks, question = [text(n) for n in (70, 130, 45)], text(12)
    response = ask(server, "offset", chunks, question, cache={**COMPARE, **cache}, **ASKED, max_tokens=24)
    compared, tokens = response["cache"]["compare"], response["choices"][0]["token_ids"]
    assert (compared["tokens"], compared["top_logprobs"]) == (24, 20)
    assert compared["mean_kl"] == pytest.approx(asked_one_by_one(server, response), abs=1e-5)
    links = (8, "chained") if cache else None
    full, cached = (
        oracle("tiny-llama").score(strategy, segments(response["cache"]), tokens, links=how).distributions
        for strategy, how in (("full", None), ("offset", links))
    )
    whole = torch.nn.functional.kl_div(cached, full, log_target=True, reduction="batchmean").item()
    assert 0 < compared["mean_kl"] <= whole + 1e-5


@pytest.mark.matrix
@pytest.mark.parametrize(
    "flags",
    [(), ("--no-enable-prefix-caching",)],
    ids=["cached", "no prefix cache"],
)
def test_an_answer_of_several_blocks_is_judged_anew_each_time(flags: tuple[str, ...], serve: Any, text: Text) -> None:
    """Also if vLLM has its blocks from full attention's own answer or an earlier comparison."""
    server, chunks, question = serve("tiny-llama", "--block-size", "32", *flags), [text(70), text(90)], text(12)
    for _ in range(3):
        response = ask(server, "offset", chunks, question, cache=COMPARE, **ASKED, max_tokens=40)
        assert response["cache"]["compare"]["mean_kl"] == pytest.approx(asked_one_by_one(server, response), abs=1e-5)
    alone = [text(100)]
    for length in range(1, 33, 2):  # of the question, which may fill a block
        compared = ask(server, "shared", alone, "q" * length, cache=COMPARE, max_tokens=40)["cache"]["compare"]
        assert compared["same_tokens"]
        assert compared["mean_kl"] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_full_attentions_answer_and_both_times(strategy: str, server: TesseraServer, text: Text) -> None:
    chunks, question = [text(n) for n in (90, 60, 120)], text(12)
    compared = ask(server, strategy, chunks, question, cache=COMPARE)
    full = ask(server, strategy, chunks, question, cache={"mode": "full"})
    cached = ask(server, strategy, chunks, question)
    assert compared["choices"][0]["token_ids"] == cached["choices"][0]["token_ids"]
    report = compared["cache"]
    assert (report["mode"], report["compare"]["answer"]) == ("chunked", full["choices"][0]["message"]["content"])
    assert report["compare"]["same_tokens"] is (full["choices"][0]["token_ids"] == cached["choices"][0]["token_ids"])
    for times in report["compare"]["timings_ms"].values():
        assert 0 < times["first_token"] <= times["total"]
    timings = report["timings_ms"]
    assert report["compare"]["timings_ms"]["cached"] == pytest.approx(
        {name: timings[name] for name in ("first_token", "total")}, abs=0.001
    )


def test_one_chunk_is_full_attention(server: TesseraServer, text: Text) -> None:
    compared = ask(server, "shared", [text(150)], text(12), cache=COMPARE)["cache"]["compare"]
    assert compared["same_tokens"]
    assert compared["mean_kl"] == pytest.approx(0, abs=1e-6)


def test_a_stream_has_it_at_its_end_and_no_log_probabilities_that_were_not_asked_for(
    server: TesseraServer, text: Text
) -> None:
    body = {"chunks": [text(40), text(80)], "question": "?", "max_tokens": 6, "temperature": 0, "cache": COMPARE}
    events = stream_events(server, "/v1/rag/chat", body)
    assert all(choice.get("logprobs") is None for event in events for choice in event.get("choices", ()))
    (report,) = [event["cache"] for event in events if "cache" in event]
    whole = server.chat(**body)
    assert whole["choices"][0]["logprobs"] is None
    assert report["compare"]["answer"] == whole["cache"]["compare"]["answer"]
    assert report["compare"]["mean_kl"] == pytest.approx(whole["cache"]["compare"]["mean_kl"], abs=1e-6)


def test_an_answer_as_long_as_the_model_allows(server: TesseraServer, text: Text) -> None:
    most = server.get("/v1/models")["data"][0]["max_model_len"]
    chunks = [text(most // 2 - 60), text(most // 2 - 60)]
    response = ask(server, "offset", chunks, text(12), max_tokens=None, cache=COMPARE)
    usage = response["usage"]
    assert usage["total_tokens"] == most
    assert response["cache"]["compare"]["tokens"] == usage["completion_tokens"]


def test_what_can_not_be_compared(server: TesseraServer, text: Text) -> None:
    body = {"chunks": [text(40)], "question": "?", "max_tokens": 2, "cache": COMPARE}
    refused = server.post("/v1/rag/chat", {**body, "n": 2}, status=400)["error"]
    assert refused["param"] == "n"
    assert "cache.mode compare needs n = 1" in refused["message"]
    report = server.chat(**{**body, "chunks": []})["cache"]
    assert (report["mode"], "compare" in report) == ("full", False)


@pytest.mark.serve_with("--max-logprobs", "0")
@pytest.mark.matrix
def test_a_server_that_gives_no_log_probabilities(server: TesseraServer, text: Text) -> None:
    body = {"chunks": [text(40)], "question": "?", "max_tokens": 2, "cache": COMPARE}
    refused = server.post("/v1/rag/chat", body, status=400)["error"]
    assert refused["param"] == "cache.mode"
    assert "--max-logprobs" in refused["message"]
