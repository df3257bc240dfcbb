# SPDX-License-Identifier: Apache-2.0
"""vLLM's client beside the servers: what it is told to do, what is made of its results, and what is refused."""

import asyncio
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from app.documents.document import Document
from measuring.speed.answers import DifferentAnswerError
from measuring.speed.rag import BenchmarkError, Query
from measuring.speed.servers import Servers
from measuring.speed.systems import Server
from measuring.speed.workloads import vllm_client
from measuring.speed.workloads.base import Options
from measuring.speed.workloads.vllm_client import VllmClient, client_flags
from tests.measuring.fake_server import chat_prompt

CHAT, CHUNKS = "/v1/chat/completions", "/v1/rag/chunks"
STAND_IN = Path(__file__).with_name("stand_in_client.py")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(vllm_client, "CLIENT", (sys.executable, "-S", str(STAND_IN)))


class TwoRounds(VllmClient):
    short = (2, 4)


async def run(folder, samples):
    """How often a step was made, and how often that had been announced."""
    steps = []
    workload = TwoRounds(Options(Path("model"), (), folder))
    async with Servers("model", (), folder) as servers:
        await workload.run(servers, samples.append, lambda: steps.append(1))
    return len(steps), workload.num_steps()


async def test_samples_are_what_the_client_measured(fakes, tmp_path):
    samples = []
    steps, announced = await run(tmp_path, samples)
    assert steps == announced
    keys = [(each.workload, each.point, each.round, each.system) for each in samples]
    turns = [(0, "stock"), (0, "warm"), (1, "warm"), (1, "stock")]
    assert keys == [("vllm_client", "concurrency 1", *turn) for turn in turns]
    assert [each.values for each in samples] == [{"ttft_s": 0.15, "tpot_s": 0.012}] * 4
    assert (tmp_path / vllm_client.LOG).read_text() == "said by the client\n" * 4


async def test_both_systems_get_the_same_prompts(fakes, tmp_path):
    await run(tmp_path, [])
    stock, tessera = (fakes.servers[name].bodies(CHAT) for name in ("stock", "tessera"))
    assert [body["messages"] for body in stock] == [body["messages"] for body in tessera]
    assert len({str(body["messages"]) for body in stock}) == 2 * 4
    for plain, split in zip(stock, tessera, strict=True):
        assert (split["max_completion_tokens"], split["temperature"], split["ignore_eos"]) == (16, 0, True)
        assert "cache" not in plain
        assert split["cache"]["mode"] == "chunked"
        prompt = chat_prompt(split)
        assert [len(Document(chunk).render()) for chunk in prompt.chunks] == [256] * 5
        assert len(prompt.question) == 32
        assert prompt.text == chat_prompt(plain).text


async def test_chunks_are_cached_ahead_of_time(fakes, tmp_path):
    await run(tmp_path, [])
    tessera = fakes.servers["tessera"]
    assert tessera.lookups == {"hit": 2 * 4 * 5}
    prompts = [chat_prompt(body) for body in tessera.bodies(CHAT)]
    for body, asked in zip(tessera.bodies(CHUNKS), (prompts[:4], prompts[4:]), strict=True):
        assert (body["system"], body["cache"]["namespace"]) == ("", asked[0].namespace)
        assert set(body["chunks"]) == {chunk for prompt in asked for chunk in prompt.chunks}
    assert not tessera.cached


async def test_chunks_that_were_not_cached_are_refused(fakes, tmp_path):
    fakes.state = {"pages_total": 8}  # one chunk
    samples = []
    with pytest.raises(DifferentAnswerError, match=r"tessera: chunks were looked up as {.*'filled'.*not all hit"):
        await run(tmp_path, samples)
    assert samples == []


@pytest.mark.parametrize(("how", "fault"), [("fail", "exited with 1"), ("lose", "1 requests failed on stock")])
async def test_a_client_that_fails_is_an_error(fakes, tmp_path, monkeypatch, how, fault):
    monkeypatch.setenv("STAND_IN", how)
    samples = []
    with pytest.raises(BenchmarkError, match=fault) as error:
        await run(tmp_path, samples)
    assert str(tmp_path / vllm_client.LOG) in str(error.value)
    assert samples == []


async def test_the_client_ends_with_the_benchmark(fakes, tmp_path, monkeypatch):
    monkeypatch.setenv("STAND_IN", "hang")
    running = asyncio.create_task(run(tmp_path, []))
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_vllm_understands_the_flags(tmp_path):
    """Its own parser and its own reader of prompts; that needs no other package than vLLM brings."""
    from vllm.benchmarks.datasets import get_samples
    from vllm.benchmarks.serve import add_cli_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    prompts, result = tmp_path / "prompts.jsonl", tmp_path / "result.json"
    vllm_client._write([Query("", ("one", "two"), "where?", 16), Query("", ("three",), "why?", 16)], prompts)
    process = SimpleNamespace(url="http://127.0.0.1:8000")
    server = Server("tessera", process, is_stock=False)
    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    args = parser.parse_args(client_flags(server, prompts, result, requests=2))
    assert (args.backend, args.base_url, args.max_concurrency) == ("openai-chat", process.url, 1)
    assert args.save_result
    assert Path(args.result_dir, args.result_filename) == result
    assert args.extra_body == {"cache": {"mode": "chunked", "namespace": "vllm-client", "separator": "\n\n"}}
    requests = get_samples(args, None)
    assert [request.prompt for request in requests] == [
        [{"type": "text", "text": "one\n\ntwo\n\nwhere?"}],
        [{"type": "text", "text": "three\n\nwhy?"}],
    ]
    assert [request.expected_output_len for request in requests] == [16, 16]


def test_forms(tmp_path):
    sizes = [VllmClient(Options(Path("model"), (), tmp_path, is_long)).sizes() for is_long in (False, True)]
    assert [(each["rounds"], each["requests_per_round"]) for each in sizes] == [(1, 4), (5, 16)]
