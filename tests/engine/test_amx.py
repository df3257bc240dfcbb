# SPDX-License-Identifier: Apache-2.0
"""bfloat16 K and V in AMX's tiled layout: chunks are reused, and answers are as exact as full attention's.

Every test of an engine runs on AMX itself where the CPU has it, and on any CPU with the layout emulated
(``amx_runtime``). `make test-amx` also runs other files' tests of bfloat16 with the emulation.
"""

import importlib
import itertools
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from app.models.random_model import build_preset
from machine.server_process import python_path, served_name
from tests.cores import all_cores
from tests.engine.conftest import ALWAYS_FETCHING, COMMON
from tests.engine.server import ServerPool, TesseraServer, token_logprobs
from tests.kernels import amx
from tests.oracle import Oracle
from tests.support.completions import complete
from tests.support.exactness import STRATEGIES, ask, assert_exact, segments, statuses
from tests.support.parallel import ENVIRONMENT, WORKERS
from tests.support.prefixes import complete as complete_prefix
from tests.support.prefixes import settle, tokens_of
from tests.support.tier_servers import origins, to_sleep

RUNTIME = Path(__file__).parent / "amx_runtime"
EMULATED = {"PYTHONPATH": f"{python_path()}{os.pathsep}{RUNTIME}"}
WITHOUT_AMX = {**EMULATED, "AMX_RUNTIME": "off"}
HEADS, BLOCKS = (64, 80, 96, 128), (32, 128)
TOLERANCE = 0.1
"""Of one log probability; their mean is compared with full attention's."""
FARTHER = 1.5
"""Mean distance to float32, at most so many times full attention's own."""

Text = Callable[[int], str]


class Model(NamedTuple):
    path: Path
    oracle: Oracle
    head_size: int


class Servers:
    """Servers of models in bfloat16 that keep K and V in AMX's layout: natively, or with the emulation."""

    def __init__(self, pool: ServerPool, *, emulated: bool) -> None:
        self._pool = pool
        self.environment = EMULATED if emulated else {}
        self._is_emulated = emulated

    def get(self, model: Model, *flags: str, **environment: str) -> TesseraServer:
        server = self._pool.get(str(model.path), *COMMON, *flags, environment={**self.environment, **environment})
        assert server.stats()["enabled"], server.stats()["reason"]
        assert server.metric("tessera_self_check_passed") == 1
        if self._is_emulated:
            is_tiled = amx.is_tiled(torch.bfloat16, size := block_size(server), model.head_size)
            assert (f"emulated: blocks of {size}, heads of {model.head_size}" in server.log.read_text()) == is_tiled
        return server


def block_size(server: TesseraServer) -> int:
    (found,) = set(re.findall(r'block_size="(\d+)"', server.client.get("/metrics").text))
    return int(found)


@pytest.fixture(scope="module", params=["emulated", "native"])
def servers(request: pytest.FixtureRequest, pool: ServerPool) -> Servers:
    if request.param == "native" and not torch.cpu._is_amx_tile_supported():
        pytest.skip("this CPU has no AMX")
    return Servers(pool, emulated=request.param == "emulated")


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Model]:
    """A model with weights in bfloat16, by the size of its heads."""
    folder = tmp_path_factory.mktemp("bfloat16")

    @cache
    def build(head_size: int) -> Model:
        path = build_preset("tiny-llama", folder / f"heads-of-{head_size}", head_dim=head_size, dtype="bfloat16")
        return Model(path, Oracle(path), head_size)

    return build


def placed(placement: str, block: int) -> tuple[str, ...]:
    return ("--chunk-cache-placement", placement, "--block-size", str(block))


def placement_of(response: dict[str, Any]) -> str:
    return response["cache"].get("placement", "copy")


def full_attention(server: TesseraServer, oracle: Oracle, *prompt: Any, **fields: Any) -> list[float]:
    """Distances of full attention's own log probabilities to float32."""
    response = ask(server, "shared", *prompt, cache={"mode": "full"}, **fields)
    expected = oracle.score("full", segments(response["cache"]), response["choices"][0]["token_ids"])
    return [abs(a - b) for a, b in zip(token_logprobs(response), expected.logprobs, strict=True)]


def assert_as_close(reused: list[float], full: list[float]) -> None:
    assert mean(reused) <= FARTHER * mean(full), (mean(reused), mean(full))


def assert_chunks_are_as_close(server: TesseraServer, oracle: Oracle, text: Text, placement: str) -> None:
    """For each strategy, chunks computed, cached, and both."""
    reused: dict[str, list[float]] = {strategy: [] for strategy in STRATEGIES}
    full = []
    for strategy in STRATEGIES * 2:
        a, b, c, d = (text(n) for n in (120, 40, 277, 64))
        orders = {"filled filled filled": [a, b, c], "hit hit hit": [c, a, b], "hit filled hit": [b, d, a]}
        for expected, chunks in orders.items():
            response = ask(server, strategy, chunks, text(15))
            assert statuses(response) == expected.split()
            is_copied = placement == "in-place" and strategy != "parallel"
            assert placement_of(response) == ("copy" if is_copied else placement)
            reused[strategy] += assert_exact(response, oracle, strategy, TOLERANCE)
        full += full_attention(server, oracle, [a, b, c], text(15))
    for of_strategy in reused.values():
        assert_as_close(of_strategy, full)


@pytest.mark.parametrize("block_size", BLOCKS)
@pytest.mark.parametrize("head_size", HEADS)
def test_emulated_attention_has_the_bits_of_vllms_own(head_size, block_size, monkeypatch):
    """For requests that begin, continue and decode, whose blocks are scattered."""
    ops = pytest.importorskip("vllm._custom_ops")
    if not hasattr(torch.ops._C, "cpu_attn_reshape_and_cache"):
        pytest.skip("this vLLM has no CPU kernels")
    from vllm.v1.attention.backends import cpu_attn

    heads, kv_heads = 4, 2
    counts, lengths = [70, 40, 1], [70, 300, 129]
    starts, seq_lens = torch.tensor([0, 70, 110, 111], dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32)
    table = torch.randperm(40)[:36].view(3, 12).to(torch.int32)
    stored = torch.randn(2, 40 * block_size, kv_heads, head_size).bfloat16()
    query = torch.randn(sum(counts), heads, head_size).bfloat16()

    def attend() -> tuple[Tensor, Tensor]:
        isa = cpu_attn._get_attn_isa(torch.bfloat16, block_size, head_size)
        kv_cache = torch.zeros(40, kv_heads, block_size, 2 * head_size, dtype=torch.bfloat16)
        key_cache, value_cache = kv_cache.view(40, kv_heads, 2 * block_size, head_size).chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(*stored, key_cache, value_cache, torch.arange(40 * block_size), isa)
        step: Any = {"seq_lens": seq_lens, "query_start_loc": starts, "causal": True}
        sizes = {"num_reqs": 3, "num_heads": heads, "num_kv_heads": kv_heads, "head_dim": head_size}
        kind = {"dtype": torch.bfloat16, "sliding_window_size": -1, "isa": isa, "enable_kv_split": True}
        metadata = ops.cpu_attn_get_scheduler_metadata(**sizes, **step, **kind)
        output, caches = torch.empty_like(query), {"key_cache": key_cache, "value_cache": value_cache}
        plain = {"alibi_slopes": None, "sliding_window": -1, "softcap": 0, "s_aux": None, "scale": head_size**-0.5}
        step |= {"query": query, "output": output, "block_table": table, "scheduler_metadata": metadata}
        ops.cpu_attention_with_kv_cache(**caches, **step, **plain)
        return output, kv_cache

    torch.cpu._init_amx()  # asks the kernel for the tiles, as oneDNN does in an engine
    expected, native_cache = attend()
    for name in ("cpu_attn_reshape_and_cache", "cpu_attention_with_kv_cache", "cpu_attn_get_scheduler_metadata"):
        monkeypatch.setattr(ops, name, getattr(ops, name))
    monkeypatch.setattr(cpu_attn, "_get_attn_isa", cpu_attn._get_attn_isa)
    monkeypatch.syspath_prepend(str(RUNTIME))
    importlib.import_module("amx_runtime").load()
    output, emulated_cache = attend()
    assert torch.equal(output, expected)
    is_tiled = amx.is_tiled(torch.bfloat16, block_size, head_size)
    assert torch.equal(native_cache, emulated_cache) == (not is_tiled or torch.cpu._is_amx_tile_supported())


@pytest.mark.matrix
def test_stock_vllm_answers_with_the_same_bits(pool, model_of, text):
    prompts, answers = [text(n) for n in (1, 31, 32, 200, 3000)], []
    for environment in ({}, EMULATED):
        server = pool.get(str(model_of(64).path), *COMMON, "--no-chunk-cache", environment=environment)
        answers.append([complete(server, tokens_of(server, prompt)) for prompt in (*prompts, *prompts)])
    assert answers[0] == answers[1]


TWO_WORKERS, COMPILED = WORKERS["tensor parallel"], ("--no-enforce-eager",)


@pytest.mark.parametrize(
    ("head_size", "placement", "flags"),
    [
        (64, "in-place", ("--block-size", "32")),
        *(
            pytest.param(*each, marks=pytest.mark.matrix)
            for each in (
                (64, "copy", ()),
                (64, "attend", ("--block-size", "128")),
                (80, "in-place", ("--block-size", "128")),
                (80, "attend", ("--block-size", "32")),
                (96, "in-place", ("--block-size", "32")),
                (96, "attend", ("--block-size", "128")),
                (128, "in-place", ("--block-size", "128")),
                (128, "attend", ("--block-size", "32")),
                *(
                    (64, placement, ("--block-size", "32", *engine))
                    for placement in ("in-place", "attend")
                    for engine in (TWO_WORKERS, COMPILED)
                ),
            )
        ),
    ],
)
def test_chunks_are_as_close_to_float32_as_full_attention(head_size, placement, flags, servers, model_of, text):
    """In place, other positions than `parallel` are copied; `copy` is what a server without any flag does."""
    model = model_of(head_size)
    if placement != "copy":
        flags = ("--chunk-cache-placement", placement, *flags)
    with all_cores():
        server = servers.get(model, *flags, **(ENVIRONMENT if "--tensor-parallel-size" in flags else {}))
    assert server.stats()["placement"] == placement
    assert_chunks_are_as_close(server, model.oracle, text, placement)


@pytest.mark.matrix
@pytest.mark.parametrize("placement", ["in-place", "attend"])
def test_preempted(placement, servers, model_of, text):
    """Blocks for one request and a half: many at once are preempted by one another."""
    model, steps = model_of(128), 60
    few = "17" if placement == "attend" else "41"
    server = servers.get(
        model, *placed(placement, 32), "--num-gpu-blocks-override", few, "--max-model-len", "480", "--max-num-seqs", "8"
    )
    groups = [[text(n) for n in (90, 60)] for _ in range(4)]
    before = server.metric("vllm:num_preemptions_total")

    def send(i: int) -> Any:
        chunks = groups[i % 4][:: 1 if i % 8 < 4 else -1]
        return STRATEGIES[i % 3], ask(server, STRATEGIES[i % 3], chunks, text(9), max_tokens=steps)

    with ThreadPoolExecutor(12) as threads:
        answers = list(threads.map(send, range(24)))
    assert server.metric("vllm:num_preemptions_total") > before, "vLLM did not preempt; the test shows nothing"
    full = [full_attention(server, model.oracle, chunks, text(9), max_tokens=steps) for chunks in groups]
    for strategy in STRATEGIES:
        found = [assert_exact(answer, model.oracle, of, TOLERANCE, steps) for of, answer in answers if of == strategy]
        assert_as_close([*itertools.chain(*found)], [*itertools.chain(*full)])


@pytest.fixture(scope="module")
def pair(servers, model_of, tmp_path_factory) -> Iterator[list[TesseraServer]]:
    """Two servers of one directory, the second without AMX."""
    folder = tmp_path_factory.mktemp("pair")
    tiers = ("--chunk-cache-tiers", f"host://?size=64MiB&timeout=60,file://{folder}/kv?size=1GiB&timeout=60")
    flags = (*COMMON, *tiers)
    with ExitStack() as stack:
        started = []
        for name, environment in (("amx", servers.environment), ("other", WITHOUT_AMX)):
            log, path = folder / f"{name}.log", str(model_of(64).path)
            server = TesseraServer(log, path, *flags, environment=environment, serve=ALWAYS_FETCHING)
            server.model = served_name([path])
            stack.callback(server.stop)
            started.append(server.wait_ready())
        yield started


@pytest.mark.matrix
def test_tiers_are_shared_by_cpus_with_and_without_amx(pair, model_of, text):
    oracle = model_of(64).oracle
    reused: dict[str, list[float]] = {strategy: [] for strategy in STRATEGIES}
    full = []
    for writer, reader in (pair, pair[::-1]):
        for strategy in STRATEGIES:
            system, chunks, question = text(40), [text(n) for n in (300, 120, 37)], text(15)
            written = ask(writer, strategy, chunks, question, system=system)
            assert origins(written) == ["filled"] * 3
            to_sleep(writer)
            reused[strategy] += assert_exact(written, oracle, strategy, TOLERANCE)
            for server, origin in ((writer, "host"), (reader, "file")):
                response = ask(server, strategy, chunks[::-1], question, system=system)
                assert origins(response) == [origin] * 3
                reused[strategy] += assert_exact(response, oracle, strategy, TOLERANCE)
                for order in (chunks, chunks[::-1]):
                    full += full_attention(server, oracle, order, question, system=system)
    for of_strategy in reused.values():
        assert_as_close(of_strategy, full)


@pytest.mark.matrix
def test_prefixes_in_tiers_are_shared_too(pair, model_of, text):
    for writer, reader in (pair, pair[::-1]):
        prompt = tokens_of(writer, text(1000))
        computed, *written = complete_prefix(writer, prompt)
        assert computed == 0
        settle(writer)
        found, *read = complete_prefix(reader, prompt)
        assert found >= 0.8 * len(prompt)
        for tokens, logprobs in (written, read):  # where two tokens are as likely, answers differ
            exact = model_of(64).oracle.score("full", ((), (), prompt), tokens).logprobs
            assert logprobs == pytest.approx(exact, abs=TOLERANCE)
