# SPDX-License-Identifier: Apache-2.0
"""Requests that attend to chunks in the pool: exact, without blocks for their context, beside ordinary requests.

The exactness suite and others run with this placement, too: TESSERA_CHUNK_CACHE_PLACEMENT=attend (`make test-attend`).
"""

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.cores import all_cores
from tests.support.completions import complete
from tests.support.exactness import QWEN3, STRATEGIES, ask, assert_exact, segments, statuses
from tests.support.in_place import DRAFTS, LOADED, most

BLOCK = 32
ATTEND = ("--chunk-cache-placement", "attend", "--block-size", str(BLOCK))


def assert_attended(response: dict[str, Any], oracle: Any, strategy: str, **options: Any) -> None:
    assert response["cache"]["placement"] == "attend"
    assert_exact(response, oracle, strategy, **options)


@pytest.mark.serve_with(*ATTEND)
@pytest.mark.parametrize("model", ["tiny-llama", QWEN3])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_order_is_exact_and_nothing_is_copied(model, strategy, server, oracle, text):
    chunks = [text(n) for n in (50, 130, 17)]
    ask(server, strategy, chunks, text(10))
    loaded = server.metric(LOADED)
    for order in [*itertools.permutations(chunks), chunks[:1], [chunks[0], *chunks]]:
        response = ask(server, strategy, list(order), text(12))
        assert statuses(response) == ["hit"] * len(order)
        assert_attended(response, oracle(model), strategy)
    assert server.metric(LOADED) == loaded


@pytest.mark.serve_with(*ATTEND)
@pytest.mark.parametrize(
    "cache",
    [{"scope": "isolated"}, {"recompute": 0.3}, {"recompute": 1}],
)
def test_scopes_and_windows(cache, server, oracle, text):
    chunks = [text(n) for n in (50, 130, 17)]
    for _ in ("filled", "hit"):
        assert_attended(ask(server, "offset", chunks, text(12), cache=cache), oracle("tiny-llama"), "offset")


@pytest.mark.serve_with(*ATTEND)
def test_the_context_may_end_in_any_place_of_a_block(server, oracle, text):
    """Also if vLLM finds the question's blocks in its prefix cache."""
    for length in range(20, 20 + BLOCK, 3):
        chunks, question = [text(length), text(40)], text(2 * BLOCK)
        for _ in ("computed", "found"):
            assert_attended(ask(server, "offset", chunks, question), oracle("tiny-llama"), "offset")
        assert_attended(ask(server, "offset", chunks[::-1], question), oracle("tiny-llama"), "offset")


@pytest.mark.serve_with(*ATTEND)
def test_ordinary_requests_beside_attending_ones(server, oracle, text):
    chunks = [text(n) for n in (45, 61, 30)]
    orders = list(itertools.permutations(chunks))
    report = ask(server, "offset", chunks, "why?")["cache"]
    system, texts, question = segments(report)
    token_ids = [*system, *itertools.chain(*texts), *question]
    alone = complete(server, token_ids)

    def send(i: int) -> Any:
        strategy = STRATEGIES[i % 3]
        return (
            (strategy, ask(server, strategy, list(orders[i % 6]), f"{i} why?"))
            if i % 2
            else complete(server, token_ids)
        )

    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(send, range(32)))
    for answer in answers:
        if isinstance(answer, list):
            assert answer == pytest.approx(alone, abs=1e-5)
        else:
            assert_attended(answer[1], oracle("tiny-llama"), answer[0])
    assert complete(server, token_ids) == pytest.approx(alone, abs=1e-5)


@pytest.mark.matrix
def test_many_requests_need_the_blocks_of_their_questions_and_answers(serve, oracle, text):
    """Sixty-four at once where copies fit three."""
    clients, num_chunks, length = 64, 8, 510
    own = -(-(BLOCK + 60 + 40) // BLOCK) + 1
    blocks = max(clients * own, 3 * num_chunks * (length + 2) // BLOCK + 30)
    memory = ("--num-gpu-blocks-override", str(1 + blocks), "--max-model-len", "5000", "--max-num-seqs", str(clients))
    server = serve("tiny-llama", *ATTEND, *memory, "--chunk-cache-memory", "64MiB")
    chunks = [text(length) for _ in range(num_chunks)]
    ask(server, "offset", chunks, text(5))

    def send(i: int) -> Any:
        return ask(server, "offset", chunks[i % 8 :] + chunks[: i % 8], text(20), max_tokens=60)

    before = server.metric("vllm:num_preemptions_total")
    metrics = "vllm:num_requests_running", "vllm:kv_cache_usage_perc"
    with most(server, *metrics) as seen, ThreadPoolExecutor(clients) as threads:
        answers = list(threads.map(send, range(clients)))
    assert seen["vllm:num_requests_running"] == clients
    assert server.metric("vllm:num_preemptions_total") == before
    assert round(seen["vllm:kv_cache_usage_perc"] * blocks) <= clients * own
    for answer in answers[:8]:
        assert_attended(answer, oracle("tiny-llama"), "offset", steps=60)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "flags",
    [
        ("--tensor-parallel-size", "2"),
        ("--no-enforce-eager",),
        ("--no-enable-prefix-caching",),
        ("--max-num-batched-tokens", "64", "--max-num-seqs", "8"),
        DRAFTS,
    ],
    ids=["two workers", "compiled", "no prefix cache", "chunked prefill", "drafts by n-grams"],
)
def test_other_engines(flags, serve, oracle, text):
    with all_cores():
        server = serve("tiny-llama", *ATTEND, *flags, environment={"VLLM_CPU_OMP_THREADS_BIND": "0|1"})
    chunks = [text(n) for n in (50, 130, 17)]

    def send(i: int) -> Any:
        order = list(itertools.permutations(chunks))[i % 6]
        return STRATEGIES[i % 3], ask(server, STRATEGIES[i % 3], list(order), text(100))

    with ThreadPoolExecutor(4) as threads:
        for strategy, answer in threads.map(send, range(12)):
            assert_attended(answer, oracle("tiny-llama"), strategy)


@pytest.mark.matrix
def test_what_the_kernel_does_not_support_is_copied(serve):
    server = serve("tiny-llama", *ATTEND, "--dtype", "float16")
    assert server.stats()["placement"] == "copy"
    assert (
        "chunks are copied, not attended to in the pool: attention over the chunk pool needs" in server.log.read_text()
    )
