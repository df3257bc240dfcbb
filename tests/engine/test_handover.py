# SPDX-License-Identifier: Apache-2.0
"""One replica computes prompts, NIXL moves their blocks, another replica answers: exactly, and nothing is poisoned."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

from replicas.signing import PeerAuth, PeerKey
from tests.engine.server import TesseraServer, stream_events
from tests.support.completions import all_tokens, complete
from tests.support.exactness import STEPS, STRATEGIES, assert_exact
from tests.support.in_place import BLOCK
from tests.support.nixl import NIXL, PLACEMENTS, REMOTE
from tests.support.split import SECRET, Split

pytestmark = pytest.mark.matrix


PEER = PeerAuth(PeerKey(SECRET))
CHAT = "/v1/rag/chat"


@pytest.fixture(scope="module", params=PLACEMENTS)
def split(request, tmp_path_factory, model_path) -> Iterator[Split]:
    pytest.importorskip("nixl", reason="NIXL is not installed (docs/connectors.md)")
    with ExitStack() as stack:
        flags = (*NIXL, *PLACEMENTS[request.param], "--max-model-len", "2048", "--block-size", str(BLOCK))
        # 3072 tokens: enough for three requests of other tests at once, not for eight of the test of preemption.
        few = ("--num-gpu-blocks-override", str(3072 // BLOCK))
        split = Split(stack, tmp_path_factory.mktemp("handover"), model_path("tiny-llama"), *flags, of_decode=few)
        split.prefill = split.start("prefill")
        split.router.wait_for("decode", "prefill")
        yield split


@pytest.fixture
def strategies(split: Split) -> list[str]:
    return ["parallel"] if split.decode.stats()["placement"] == "in-place" else STRATEGIES


def body(server: TesseraServer, *chunks: str, strategy: str = "parallel", **fields: Any) -> dict[str, Any]:
    cache = {"position_strategy": strategy, "explain": True}
    asked = {"system": "You answer.", "chunks": chunks, "question": "What is it?", "max_tokens": STEPS, "cache": cache}
    asked |= {"temperature": 0, "ignore_eos": True, "logprobs": True, "return_token_ids": True, "model": server.model}
    return {**asked, **fields}


def handed_over(split: Split, asked: dict[str, Any]) -> dict[str, Any]:
    """The parameters of a prompt that the prefill replica has computed."""
    first = {**asked, "max_tokens": 1, "kv_transfer_params": REMOTE}
    answer = split.prefill.client.post(CHAT, json=first, auth=PEER)
    assert answer.status_code == 200, answer.text
    return answer.json()["kv_transfer_params"]


def answered(split: Split, asked: dict[str, Any], params: dict[str, Any], status: int = 200) -> dict[str, Any]:
    answer = split.decode.client.post(CHAT, json={**asked, "kv_transfer_params": params}, auth=PEER)
    assert answer.status_code == status, answer.text
    return answer.json()


def assert_unpoisoned(split: Split, oracle: Any, answer: dict[str, Any]) -> None:
    """Asserts that the same tokens in full attention find nothing of what was composed."""
    tokens = all_tokens(answer["cache"])
    for server in (split.decode, split.prefill):
        assert complete(server, tokens) == pytest.approx(oracle.full(tokens, STEPS).logprobs, abs=1e-5)


def handovers(split: Split) -> dict[str, int]:
    return split.decode.stats()["counters"]["handovers"]


def test_chunked_and_ordinary_requests_several_at_once(split, strategies, oracle, text):
    reference = oracle("tiny-llama")

    def ask(number: int) -> dict[str, Any]:
        strategy = strategies[number % len(strategies)]
        chunks = [text(200 + number), text(37), text(400)]
        answer = split.router.client.post(CHAT, json=body(split.decode, *chunks, strategy=strategy)).json()
        assert_exact(answer, reference, strategy)
        return answer

    with ThreadPoolExecutor(3) as threads:
        answers = list(threads.map(ask, range(9)))
    assert [answer["cache"]["handover"] for answer in answers] == [{"outcome": "taken"}] * 9
    assert handovers(split) == {"taken": 9}
    read = split.decode.metric("vllm:external_prefix_cache_hits_total")
    assert read >= sum(answer["cache"]["tokens"]["prompt"] for answer in answers) * 0.9
    for answer in answers[:3]:
        assert_unpoisoned(split, reference, answer)

    tokens = split.decode.post("/tokenize", {"prompt": text(500)})["tokens"]
    expected = reference.full(tokens, STEPS).logprobs
    asked = {"prompt": tokens, "max_tokens": STEPS, "temperature": 0, "ignore_eos": True, "logprobs": 0}
    for _ in range(2):
        answer = split.router.client.post("/v1/completions", json={**asked, "model": split.decode.model}).json()
        assert answer["choices"][0]["logprobs"]["token_logprobs"] == pytest.approx(expected, abs=1e-4)
    assert handovers(split)["taken"] == 11


def test_streams(split, strategies, oracle, text):
    asked = body(split.decode, text(300), text(90), strategy=strategies[0])
    whole = split.router.client.post(CHAT, json=asked).json()["choices"][0]["message"]["content"]
    *events, last = stream_events(split.router, CHAT, asked)
    texts = [event["choices"][0]["delta"].get("content") or "" for event in [*events, last] if event["choices"]]
    assert "".join(texts) == whole
    assert last["cache"]["handover"] == {"outcome": "taken"}


def test_preempted_requests_are_answered_and_poison_nothing(split, strategies, oracle, text):
    """Blocks that another engine filled are gone after a preemption: full attention goes on."""

    def ask(number: int) -> dict[str, Any]:
        asked = body(split.decode, text(150 + number), text(90), strategy=strategies[0], max_tokens=300)
        return answered(split, asked, handed_over(split, asked))

    before = split.decode.metric("vllm:num_preemptions_total")
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(ask, range(8)))
    assert split.decode.metric("vllm:num_preemptions_total") > before, "nobody was preempted; the test shows nothing"
    lost = [answer for answer in answers if answer["cache"]["handover"]["outcome"] == "lost"]
    assert lost
    for answer in answers:
        assert len(answer["choices"][0]["token_ids"]) == 300
        if answer not in lost:
            assert_exact(answer, oracle("tiny-llama"), strategies[0], steps=300)
        assert_unpoisoned(split, oracle("tiny-llama"), answer)


@pytest.mark.parametrize("change", [{"digest": "0" * 64}, {"mode": "full"}, {"version": 2}])
def test_forged_handovers_are_not_used(split, oracle, text, change):
    asked = body(split.decode, text(300), text(90))
    params = handed_over(split, asked)
    params["tessera_handover"] |= change
    answer = answered(split, asked, params)
    assert answer["cache"]["handover"]["outcome"] == "refused"
    assert_exact(answer, oracle("tiny-llama"), "parallel")
    assert_unpoisoned(split, oracle("tiny-llama"), answer)


def test_malformed_handovers_get_400_and_others_403(split, text):
    asked = body(split.decode, text(300))
    params = handed_over(split, asked)
    for wrong in ({}, {"version": 1}, {"version": 1, "mode": "x", "placement": "copy", "digest": ""}):
        error = answered(split, asked, {**params, "tessera_handover": wrong}, 400)["error"]
        assert error["param"] == "kv_transfer_params"
    del params["tessera_handover"]
    assert "tessera_handover" in answered(split, asked, params, 400)["error"]["message"]
    chat = {"messages": [{"role": "user", "content": "Hi"}], "kv_transfer_params": params, "model": split.decode.model}
    refused = split.router.client.post("/v1/chat/completions", json=chat)
    assert (refused.status_code, refused.json()["error"]["reason"]) == (403, "peers_only")


def test_a_dead_prefill_replica(split, oracle, text):
    """Dies before its blocks are read, then before it is asked."""
    asked = body(split.decode, text(300), text(90))
    params = handed_over(split, asked)
    os.killpg(split.prefill.process.pid, signal.SIGKILL)
    answer = answered(split, asked, params)
    assert answer["cache"]["handover"]["outcome"] == "failed"
    assert_exact(answer, oracle("tiny-llama"), "parallel")
    answer = split.router.client.post(CHAT, json=asked).json()
    assert "handover" not in answer["cache"]
    assert_exact(answer, oracle("tiny-llama"), "parallel")
