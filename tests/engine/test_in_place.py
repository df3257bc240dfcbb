# SPDX-License-Identifier: Apache-2.0
"""Chunks shared in place: exact, found at any place, and held once for any number of requests.

`test_exactness.py` runs in place, too: TESSERA_CHUNK_CACHE_PLACEMENT=in-place (`make test-in-place`).
"""

import itertools
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from vllm.distributed.kv_events import BlockStored, KVEventBatch

from tests.cores import all_cores
from tests.engine.server import TesseraServer
from tests.support.completions import complete
from tests.support.exactness import QWEN3, STEPS, ask, assert_exact, assert_scored, segments, statuses
from tests.support.in_place import BLOCK, DRAFTS, HITS, IN_PLACE, LOADED, most

Text = Callable[[int], str]

LITTLE = ("--num-gpu-blocks-override", "41", "--max-model-len", "640")
"""Blocks for 40 times 32 tokens."""


def assert_in_place(response: dict[str, Any], oracle: Any) -> None:
    assert response["cache"]["placement"] == "in-place"
    system, chunks, _ = segments(response["cache"])
    assert all(len(segment) % BLOCK == 0 for segment in (system, *chunks))
    assert_exact(response, oracle, response["cache"]["position_strategy"])


@pytest.mark.serve_with(*IN_PLACE)
@pytest.mark.parametrize("model", ["tiny-llama", QWEN3])
def test_chunks_are_found_wherever_they_stand(model: str, server: TesseraServer, oracle: Any, text: Text) -> None:
    chunks = [text(n) for n in (50, 130, 17)]
    assert server.stats()["placement"] == "in-place"
    ask(server, "parallel", chunks, text(10))
    loaded = server.metric(LOADED)
    for order in [*itertools.permutations(chunks), chunks[:1], chunks[1:], [chunks[0], *chunks]]:
        response = ask(server, "parallel", list(order), text(12))
        assert statuses(response) == ["hit"] * len(order)
        assert_in_place(response, oracle(model))
    assert server.metric(LOADED) == loaded


@pytest.mark.serve_with(*IN_PLACE)
def test_the_question_may_end_in_any_place_of_a_block(server: TesseraServer, oracle: Any, text: Text) -> None:
    """Answers continue in blocks of their own, chained to the whole composition."""
    chunks = [text(40), text(70)]
    for length in (1, BLOCK - 3, BLOCK, BLOCK + 1, 2 * BLOCK):
        question = text(length)
        for _ in range(2):
            assert_in_place(ask(server, "parallel", chunks, question), oracle("tiny-llama"))
        assert_in_place(ask(server, "parallel", chunks[::-1], question), oracle("tiny-llama"))


@pytest.mark.serve_with(*IN_PLACE)
def test_beside_copies_and_ordinary_requests(server: TesseraServer, oracle: Any, text: Text) -> None:
    """Concurrently, over the same chunks: no block gets another block's position or KV."""
    chunks = [text(n) for n in (45, 61, 30)]
    orders = list(itertools.permutations(chunks))

    def send(i: int) -> tuple[str, Any]:
        if i % 3 == 0:
            copied = ("shared", "offset")[i % 2]
            return copied, ask(server, copied, list(orders[i % 6]), f"{i} why?")
        if i % 3 == 1:
            return "full", ask(server, "shared", list(orders[i % 6]), f"{i} why?", cache={"mode": "full"})
        return "parallel", ask(server, "parallel", list(orders[i % 6]), f"{i % 7} why?")

    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(send, range(48)))
    for strategy, answer in answers:
        if strategy == "full":
            assert_scored(answer, oracle("tiny-llama"))
        else:
            assert ("placement" in answer["cache"]) == (strategy == "parallel")
            assert_exact(answer, oracle("tiny-llama"), strategy)


@pytest.mark.serve_with(*IN_PLACE)
def test_ordinary_requests_find_what_is_theirs(server: TesseraServer, oracle: Any, text: Text) -> None:
    """An ordinary prompt of a composition's tokens hits the first chunk's blocks only: later chunks did not see it."""
    system, chunks, question = segments(ask(server, "parallel", [text(70), text(90)], text(40))["cache"])
    token_ids = [*system, *chunks[0], *chunks[1], *question]
    before = server.metric(HITS)
    logprobs = complete(server, token_ids)
    assert server.metric(HITS) - before == len(system) + len(chunks[0])
    full = oracle("tiny-llama").full(token_ids, STEPS)
    assert logprobs == pytest.approx(full.logprobs, abs=1e-4)


def flood(server: TesseraServer, text: Text) -> None:
    """Sends ordinary requests that take all blocks of a server with few."""
    for _ in range(3):
        server.chat(chunks=[], question=text(500), max_tokens=1)


@pytest.mark.matrix
@pytest.mark.serve_with(*IN_PLACE, *LITTLE)
def test_what_the_engine_evicted_is_loaded_from_the_pool(server: TesseraServer, oracle: Any, text: Text) -> None:
    chunks = [text(n) for n in (90, 100, 60)]
    ask(server, "parallel", chunks, text(10))
    loaded = server.metric(LOADED)
    assert_in_place(ask(server, "parallel", chunks[::-1], text(10)), oracle("tiny-llama"))
    assert server.metric(LOADED) == loaded
    flood(server, text)
    response = ask(server, "parallel", chunks[::-1], text(10))
    assert statuses(response) == ["hit"] * 3
    assert_in_place(response, oracle("tiny-llama"))
    assert server.metric(LOADED) > loaded


@pytest.mark.matrix
def test_many_requests_hold_their_chunks_once(serve: Any, oracle: Any, text: Text) -> None:
    """Sixteen concurrent requests in KV memory for one and a half; with copies or full attention, some wait."""
    clients, blocks = 16, 145
    server = serve("tiny-llama", *IN_PLACE, "--num-gpu-blocks-override", str(1 + blocks), "--max-model-len", "4096")
    chunks = [text(n) for n in (740, 780, 750, 700)]
    orders = list(itertools.permutations(chunks))[:clients]

    def answers(strategy: str, mode: str = "auto") -> list[Any]:
        fields = {"max_tokens": 60, "cache": {"mode": mode}}
        with ThreadPoolExecutor(clients) as threads:
            return list(threads.map(lambda order: ask(server, strategy, list(order), text(10), **fields), orders))

    ask(server, "parallel", chunks, text(10))
    before = server.metric("vllm:num_preemptions_total")
    with most(server, "vllm:num_requests_running", "vllm:kv_cache_usage_perc") as seen:
        in_place = answers("parallel")
    system, contexts, question = segments(in_place[0]["cache"])
    context = sum(map(len, (system, *contexts))) // BLOCK
    own = -(-(len(question) + 60) // BLOCK)
    assert blocks <= 1.5 * (context + own)
    assert seen["vllm:num_requests_running"] == clients
    assert server.metric("vllm:num_preemptions_total") == before
    assert round(seen["vllm:kv_cache_usage_perc"] * blocks) <= context + clients * own
    for answer in in_place:
        assert_exact(answer, oracle("tiny-llama"), "parallel", steps=60)
        assert answer["cache"]["placement"] == "in-place"

    for strategy, mode in (("offset", "auto"), ("shared", "full")):
        with most(server, "vllm:num_requests_running", "vllm:num_requests_waiting") as seen:
            answers(strategy, mode)
        assert seen["vllm:num_requests_running"] < clients
        assert seen["vllm:num_requests_waiting"] > 0


@pytest.mark.matrix
@pytest.mark.serve_with(*IN_PLACE, *LITTLE)
def test_preempted_answers_stay_exact(server: TesseraServer, oracle: Any, text: Text) -> None:
    """More requests than the blocks suffice for, with long answers over contexts that evict one another."""
    groups = [[text(n) for n in (90, 60)] for _ in range(4)]
    before = server.metric("vllm:num_preemptions_total")

    def send(i: int) -> Any:
        return ask(server, "parallel", groups[i % 4][:: 1 if i % 8 < 4 else -1], text(9), max_tokens=120)

    with ThreadPoolExecutor(12) as threads:
        answers = list(threads.map(send, range(24)))
    assert server.metric("vllm:num_preemptions_total") > before, "vLLM did not preempt; the test shows nothing"
    for answer in answers:
        assert_exact(answer, oracle("tiny-llama"), answer["cache"]["position_strategy"], steps=120)
        assert answer["cache"]["placement"] == "in-place"


@pytest.mark.matrix
@pytest.mark.parametrize(
    "flags",
    [("--tensor-parallel-size", "2"), ("--no-enforce-eager",), DRAFTS],
    ids=["two workers", "compiled", "drafts by n-grams"],
)
def test_other_engines(flags: tuple[str, ...], serve: Any, oracle: Any, text: Text) -> None:
    with all_cores():
        server = serve("tiny-llama", *IN_PLACE, *flags, environment={"VLLM_CPU_OMP_THREADS_BIND": "0|1"})
    chunks = [text(n) for n in (50, 130, 17)]
    for order in itertools.permutations(chunks):
        assert_in_place(ask(server, "parallel", list(order), text(40)), oracle("tiny-llama"))


@pytest.mark.serve_with(*IN_PLACE[:2], "--block-size", "128", "--max-model-len", "200")
@pytest.mark.matrix
def test_a_model_too_short_for_the_self_check_copies(server: TesseraServer, text: Text) -> None:
    assert server.stats()["placement"] == "copy"
    assert "chunks are copied, not shared in place: self-check failed: VLLMValidationError" in server.log.read_text()
    report = ask(server, "shared", [text(20), text(30)], text(9))["cache"]
    assert (report["mode"], "placement" in report) == ("chunked", False)


@pytest.mark.matrix
def test_subscribers_see_the_same_hashes_for_a_chunk_at_any_place(serve: Any, text: Text, tmp_path: Path) -> None:
    """vLLM's KV events, from which routers and offloading learn about blocks."""
    endpoint = f"ipc://{tmp_path}/events"
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint}
    server = serve("tiny-llama", *IN_PLACE, *LITTLE, "--kv-events-config", json.dumps(events))
    chunks = [text(n) for n in (30, 62, 90)]
    with subscribed(endpoint) as stored:
        for _ in range(10):  # a subscriber misses earlier events
            server.chat(chunks=[], question=text(100), max_tokens=1)
            if stored():
                break
        ask(server, "parallel", chunks, text(10))
        first = stored()
        flood(server, text)
        stored()
        response = ask(server, "parallel", chunks[::-1], text(10))
        again = stored()
    system, computed, _ = segments(response["cache"])
    assert computed[0] != segments(response["cache"])[1][2]
    for tokens in (system, *computed):
        for start in range(0, len(tokens), BLOCK):
            block = tuple(tokens[start : start + BLOCK])
            assert first[block] == again[block], "a block has another hash at another place"


@contextmanager
def subscribed(endpoint: str) -> Iterator[Callable[[], dict[tuple[int, ...], bytes]]]:
    """Yields a function that returns hashes by tokens of the blocks stored since its last call."""
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.connect(endpoint)
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        decoder = msgspec.msgpack.Decoder(KVEventBatch)

        def stored() -> dict[tuple[int, ...], bytes]:
            found: dict[tuple[int, ...], bytes] = {}
            while socket.poll(2000):
                *_, payload = socket.recv_multipart()
                for event in decoder.decode(payload).events:
                    if isinstance(event, BlockStored):
                        starts = range(0, len(event.token_ids), BLOCK)
                        blocks = [tuple(event.token_ids[start : start + BLOCK]) for start in starts]
                        found.update(zip(blocks, event.block_hashes, strict=True))
            return found

        yield stored
