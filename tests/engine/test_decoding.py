# SPDX-License-Identifier: Apache-2.0
"""Generated tokens that attend to some blocks, chosen by each layer and KV head, equal the oracle's under its mask."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.cores import all_cores
from tests.engine.server import TesseraServer, token_logprobs
from tests.oracle import Oracle
from tests.support.exactness import STRATEGIES, ask, segments

pytestmark = pytest.mark.matrix

Text = Callable[[int], str]
SIZE, NUMBER, STEPS = 32, 6, 24
SPARSE = ("--decode-sparse-budget", str(SIZE * NUMBER + 5), "--block-size", str(SIZE))
SMALL = ("--max-num-batched-tokens", "64", "--num-gpu-blocks-override", "40", "--max-model-len", "640")
"""Prefills take many steps, and there are blocks for three requests."""
BLOCKS = {"size": SIZE, "number": NUMBER}
DRAFTS = json.dumps({"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1, "prompt_lookup_max": 3})


def assert_sparse(response: dict[str, Any], oracle: Oracle, strategy: str, steps: int = STEPS) -> None:
    tokens = response["choices"][0]["token_ids"]
    assert len(tokens) == steps
    prompt = segments(response["cache"])
    expected = oracle.score(strategy, prompt, tokens, blocks=BLOCKS).logprobs
    assert token_logprobs(response) == pytest.approx(expected, abs=1e-4)
    everything = oracle.score(strategy, prompt, tokens).logprobs
    assert token_logprobs(response) != pytest.approx(everything, abs=1e-4), "nothing was left out"


def complete(server: TesseraServer, prompt: str, steps: int = STEPS) -> dict[str, Any]:
    """An ordinary completion, without chunks."""
    body = {"prompt": prompt, "max_tokens": steps, "temperature": 0, "ignore_eos": True, "logprobs": 0}
    answer = server.post("/v1/completions", {**body, "return_token_ids": True})["choices"][0]
    return {"prompt": answer["prompt_token_ids"], "tokens": answer["token_ids"], "logprobs": answer["logprobs"]}


def assert_ordinary(answer: dict[str, Any], oracle: Oracle, blocks: dict[str, Any] | None = BLOCKS) -> None:
    expected = oracle.score("full", ((), (), answer["prompt"]), answer["tokens"], blocks=blocks).logprobs
    assert answer["logprobs"]["token_logprobs"] == pytest.approx(expected, abs=1e-4)


@pytest.mark.serve_with(*SPARSE, *SMALL)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_chunked_requests(strategy: str, server: TesseraServer, oracle: Any, text: Text) -> None:
    chunks = [text(length) for length in (150, 90, 210)]
    for order in (chunks, chunks[::-1]):
        assert_sparse(ask(server, strategy, order, text(30), max_tokens=STEPS), oracle("tiny-llama"), strategy)


@pytest.mark.serve_with(*SPARSE, *SMALL)
def test_ordinary_prompts_of_any_length(server: TesseraServer, oracle: Any, text: Text) -> None:
    """The last step of a prompt may have one token: it is of the prompt all the same."""
    assert server.stats()["decode_budget"] == SIZE * NUMBER + 5
    prompts = [text(length) for length in (1, SIZE * NUMBER - 3, 5 * 64, 5 * 64 + 1, 300)]
    with ThreadPoolExecutor(len(prompts)) as threads:
        answers = list(threads.map(lambda prompt: complete(server, prompt), [*prompts, prompts[2]]))
    for answer in answers:
        assert_ordinary(answer, oracle("tiny-llama"))
    assert_ordinary(complete(server, text(50)), oracle("tiny-llama"), blocks=None)


@pytest.mark.serve_with(*SPARSE, *SMALL)
def test_preempted_answers_stay_exact(server: TesseraServer, oracle: Any, text: Text) -> None:
    """Their generated tokens are computed again, together, each with the blocks that it read before."""
    chunks = [text(120), text(100)]
    ask(server, "offset", chunks, text(5))
    before = server.metric("vllm:num_preemptions_total")

    def send(i: int) -> Any:
        strategy = STRATEGIES[i % 3]
        if i % 2:
            return strategy, ask(server, strategy, chunks, text(9), max_tokens=90)
        return None, complete(server, text(200), 90)

    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(send, range(12)))
    assert server.metric("vllm:num_preemptions_total") > before, "vLLM did not preempt; the test shows nothing"
    for strategy, answer in answers:
        if strategy is None:
            assert_ordinary(answer, oracle("tiny-llama"))
        else:
            assert_sparse(answer, oracle("tiny-llama"), strategy, steps=90)


@pytest.mark.parametrize(
    ("model", "flags"),
    [
        ("tiny-llama", ("--speculative-config", DRAFTS)),
        ("tiny-llama", ("--tensor-parallel-size", "2")),
        ("tiny-llama", ("--no-enable-prefix-caching",)),
        ("tiny-llama", ("--no-enforce-eager",)),
        ("tiny-qwen3", ("--chunk-cache-placement", "in-place")),
    ],
)
def test_beside_other_features(model: str, flags: tuple[str, ...], serve: Any, oracle: Any, text: Text) -> None:
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"} if "--tensor-parallel-size" in flags else None
    with all_cores():
        server = serve(model, *SPARSE, *flags, environment=environment)
    strategy = "parallel" if "in-place" in flags else "offset"
    chunks = [text(length) for length in (150, 90, 210)]
    for _ in range(2):
        assert_sparse(ask(server, strategy, chunks, text(30), max_tokens=60), oracle(model), strategy, 60)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [(("--chunk-cache-placement", "attend"), "attend"), (("--decode-sparse-budget", "100"), "less than 4 blocks")],
)
def test_servers_that_cannot_choose_say_so(flags: tuple[str, ...], reason: str, serve: Any, text: Text) -> None:
    server = serve("tiny-llama", *SPARSE, *flags)
    assert server.stats()["decode_budget"] is None
    assert reason in server.log.read_text()
    assert ask(server, "offset", [text(200), text(80)], text(9))["cache"]["mode"] == "chunked"
