# SPDX-License-Identifier: Apache-2.0
"""vLLM's request fields and scheduling over chunks: exact whether the chunks are filled or hit."""

import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from tests.engine.server import TesseraServer, token_logprobs
from tests.oracle import Oracle
from tests.support.concurrently import apart, rag_body, run
from tests.support.exactness import ONE_OF_STRATEGIES, STRATEGIES, ask, assert_exact, segments, statuses

VOCABULARY, IMPOSSIBLE = 260, -9999.0
"""Tokens of the random models, and vLLM's log probability of tokens that a grammar forbids."""
CODE = {"type": "object", "properties": {"code": {"enum": [7342, 9]}}, "required": ["code"]}


def explained(system: str, chunks: list[str], question: str, strategy: str) -> dict[str, Any]:
    """A request whose response has all data for the oracle."""
    body = rag_body(system, chunks, question, strategy)
    return {**body, "return_token_ids": True, "cache": {**body["cache"], "explain": True}}


def assert_exact_choices(response: dict[str, Any], oracle: Oracle, strategy: str) -> None:
    """Asserts that every choice's log probabilities equal the oracle's for its tokens."""
    report = response["cache"]
    assert report["mode"] == "chunked", report
    for choice in response["choices"]:
        expected = oracle.score(strategy, segments(report), choice["token_ids"]).logprobs
        assert token_logprobs({"choices": [choice]}) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("strategy", ONE_OF_STRATEGIES)
def test_several_answers_are_each_exact(strategy, server, oracle, text):
    chunks, system = [text(150), text(60)], text(20)
    body = {**explained(system, chunks, text(20), strategy), "n": 3, "temperature": 1.0, "seed": 5}
    for status in ("filled", "hit"):
        response = server.chat(**body)
        assert statuses(response) == [status] * 2
        assert len({tuple(choice["token_ids"]) for choice in response["choices"]}) == 3
        assert_exact_choices(response, oracle("tiny-llama"), strategy)


def test_log_probabilities_of_alternatives(server, oracle, text):
    body = {**explained(text(20), [text(150), text(60)], text(20), "shared"), "top_logprobs": 5}
    for status in ("filled", "hit"):
        response = server.chat(**body)
        assert statuses(response) == [status] * 2
        (choice,) = response["choices"]
        expected = oracle("tiny-llama").score("shared", segments(response["cache"]), choice["token_ids"])
        best = expected.distributions.topk(5).values
        found = [[each["logprob"] for each in entry["top_logprobs"]] for entry in choice["logprobs"]["content"]]
        assert torch.tensor(found) == pytest.approx(best, abs=1e-4)


@pytest.mark.parametrize(
    ("constraint", "pattern"),
    [
        ({"structured_outputs": {"regex": "[a-c]{4}-[0-9]{2}"}}, "[a-c]{4}-[0-9]{2}"),
        ({"structured_outputs": {"choice": ["Falcon", "Heron"]}}, "Falcon|Heron"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "code", "schema": CODE}}},
            r'\{\s*"code"\s*:\s*(7342|9)\s*\}',
        ),
    ],
    ids=["regex", "choice", "json_schema"],
)
@pytest.mark.parametrize("strategy", ONE_OF_STRATEGIES)
def test_structured_output(strategy, constraint, pattern, server, oracle, text):
    """Log probabilities cover the tokens that the grammar allows."""
    body = {**explained(text(20), [text(150), text(60)], text(20), strategy), **constraint, "max_tokens": 200}
    body |= {"ignore_eos": False, "top_logprobs": VOCABULARY, "return_tokens_as_token_ids": True}
    for status in ("filled", "hit"):
        response = server.chat(**body)
        assert statuses(response) == [status] * 2
        content = response["choices"][0]["message"]["content"]
        assert re.fullmatch(pattern, content), content
        (choice,) = response["choices"]
        expected = oracle("tiny-llama").score(strategy, segments(response["cache"]), choice["token_ids"])
        for row, entry in zip(expected.distributions, choice["logprobs"]["content"], strict=True):
            found = {int(each["token"].removeprefix("token_id:")): each["logprob"] for each in entry["top_logprobs"]}
            allowed = [token for token, logprob in found.items() if logprob > IMPOSSIBLE]
            assert [found[token] for token in allowed] == pytest.approx(row[allowed].log_softmax(-1).tolist(), abs=1e-4)


def test_prompt_logprobs_are_those_of_full_attention(server, oracle, text):
    """Also with cached chunks; vLLM's prefix cache hits no composed block."""
    chunks, question, system = [text(150), text(130)], text(140), text(20)
    assert statuses(ask(server, "shared", chunks, question, system=system)) == ["filled"] * 2
    response = ask(server, "shared", chunks, question, system=system, prompt_logprobs=0)
    assert (response["cache"]["mode"], response["cache"]["tokens"]["reused"]) == ("full", 0)
    ids = [token for each in response["cache"]["segments"] for token in each["token_ids"]]
    with torch.no_grad():
        expected = oracle("tiny-llama").model(torch.tensor([ids])).logits[0].log_softmax(-1)
    found = [step[str(token)]["logprob"] for token, step in zip(ids[1:], response["prompt_logprobs"][1:], strict=True)]
    assert found == pytest.approx([float(expected[i, token]) for i, token in enumerate(ids[1:])], abs=1e-4)
    assert statuses(ask(server, "shared", chunks, text(9), system=system)) == ["hit"] * 2


@pytest.fixture
def scheduled(serve: Any) -> TesseraServer:
    """A server with priorities, development endpoints, no prefix cache, and few enough blocks for preemption."""
    flags = ("--scheduling-policy", "priority", "--no-enable-prefix-caching", "--num-gpu-blocks-override", "24")
    environment = {"VLLM_SERVER_DEV_MODE": "1"}
    return serve("tiny-llama", *flags, "--block-size", "32", "--max-model-len", "640", environment=environment)


@pytest.mark.parametrize("strategy", ONE_OF_STRATEGIES)
@pytest.mark.matrix
def test_without_vllms_prefix_cache(strategy, scheduled, oracle, text):
    chunks, question = [text(100), text(64)], text(100)
    for status in ("filled", "hit", "hit"):
        response = ask(scheduled, strategy, chunks, question)
        assert statuses(response) == [status] * 2
        assert_exact(response, oracle("tiny-llama"), strategy)
    assert response["cache"]["tokens"]["computed"] == len(segments(response["cache"])[2])


@pytest.mark.matrix
def test_beside_another_worker_extension(serve, oracle, text, tmp_path):
    (tmp_path / "theirs.py").write_text("class Extension:\n    def hello(self):\n        return 'hello'\n")
    environment = {"VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": str(tmp_path)}
    server = serve("tiny-llama", "--worker-extension-cls", "theirs.Extension", environment=environment)
    assert server.client.post("/collective_rpc", json={"method": "hello"}).json() == {"results": ["hello"]}
    assert_exact(ask(server, "offset", [text(60), text(40)], text(10)), oracle("tiny-llama"), "offset")


@pytest.mark.matrix
def test_requests_of_several_priorities(scheduled, text):
    """The latest request has the highest priority and overtakes; preempted requests load their chunks again."""
    system, chunks = text(10), [text(60), text(40)]
    bodies = [
        {**rag_body(system, [*order, text(20)], text(10), STRATEGIES[i % 3]), "max_tokens": 240, "priority": 9 - i}
        for i, order in enumerate([chunks, chunks[::-1]] * 4)
    ]
    ended: list[int] = []

    def ask_and_note(i: int) -> tuple[list[float], dict[str, Any]]:
        answer = run(scheduled, "/v1/rag/chat", bodies[i], False)
        ended.append(i)
        return answer

    before = scheduled.metric("vllm:num_preemptions_total")
    last = len(bodies) - 1
    with ThreadPoolExecutor(len(bodies)) as threads:
        running = [threads.submit(ask_and_note, i) for i in range(last)]
        while scheduled.running_requests() < last:  # far more than the blocks suffice for
            assert not ended
        running.append(threads.submit(ask_and_note, last))
    assert ended[-1] != last
    assert scheduled.metric("vllm:num_preemptions_total") > before, "nobody was preempted; the test shows nothing"
    for body, (logprobs, report) in zip(bodies, [each.result() for each in running], strict=True):
        assert report["mode"] == "chunked"
        assert len(logprobs) == 240
        assert logprobs == pytest.approx(run(scheduled, "/v1/rag/chat", apart(body), False)[0], abs=1e-4)


@pytest.mark.matrix
def test_what_runs_during_a_complete_reset_never_loads_chunks_of_before(scheduled, text):
    """vLLM would recompute the request, perhaps with other weights, behind chunks of the old weights."""
    body = {**rag_body(text(20), [text(100)], text(20), "shared"), "max_tokens": 450}
    before = scheduled.metric("vllm:generation_tokens_total")
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(scheduled.client.post, "/v1/rag/chat", json=body)
        while scheduled.metric("vllm:generation_tokens_total") < before + 5:
            assert not running.done()
        answered = scheduled.client.post("/reset_prefix_cache?reset_running_requests=true")
        assert answered.json() == {"success": True}
        response = running.result()
    report = response.json()["cache"]  # the client had received nothing yet
    assert (report["mode"], report["reason"]) == ("full", "a worker refused to load the cached chunks")
    assert scheduled.wait_idle()["occupancy"]["segments"] == 0


@pytest.mark.parametrize(
    "calls",
    [("/reset_prefix_cache",), ("/sleep?level=1", "/wake_up"), ("/sleep?level=2", "/wake_up")],
    ids=["reset", "sleep 1", "sleep 2"],
)
@pytest.mark.matrix
def test_after_a_reset_or_sleep_all_is_computed_anew(calls, scheduled, oracle, text):
    chunks, system = [text(100), text(64)], text(20)
    for _ in range(2):
        for status in ("filled", "hit"):
            response = ask(scheduled, "offset", chunks, text(20), system=system)
            assert statuses(response) == [status] * 2
            assert_exact(response, oracle("tiny-llama"), "offset")
        for call in calls:
            answered = scheduled.client.post(call)
            assert answered.status_code == 200, answered.text
            assert answered.text != '{"success":false}'  # some have no body
        assert scheduled.stats()["occupancy"]["segments"] == 0
