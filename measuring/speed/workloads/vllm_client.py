# SPDX-License-Identifier: Apache-2.0
"""The gain measured by somebody else: vLLM's own client, `vllm bench serve`, against both servers."""

import asyncio
import itertools
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from measuring.speed.answers import DifferentAnswerError
from measuring.speed.pool import lookups
from measuring.speed.rag import BenchmarkError, Query
from measuring.speed.samples import Claim, Ratio, Sample, System
from measuring.speed.servers import STOCK, TESSERA, Servers
from measuring.speed.systems import Server
from measuring.speed.traces import CHUNKS_PER_REQUEST, zipf_trace
from measuring.speed.workloads.base import Options, Record, Step

CLIENT = (sys.executable, "-m", "engine_ext.start.vllm_command", "bench", "serve")
LOG = "vllm-client.log"
_CHUNKS, _CHUNK_TOKENS, _QUESTION_TOKENS, _OUTPUT_TOKENS = 200, 256, 32, 16
_POINT = "concurrency 1"
_NAMESPACE = "vllm-client"
_SEPARATOR = "\n\n"
"""What Tessera puts behind each chunk anyway: both systems get the same prompt, token for token."""


class VllmClient:
    """Times of one request at a time, the medians of each round as vLLM's client reports them.

    That client sends one user message and no system prompt; Tessera splits it into chunks and question. The chunks are
    cached ahead of time; orders and questions are new.
    """

    name = "vllm_client"
    title = "popular chunks and others, measured by vLLM's own client"
    axis = "load"
    # Rounds, and requests of each.
    short, long = (1, 4), (5, 16)

    def __init__(self, options: Options) -> None:
        self._rounds, self._requests = self.long if options.is_long else self.short
        self._output = options.output
        self._texts = options.texts(self.name)
        self._chunks = self._texts.chunks(_CHUNKS, _CHUNK_TOKENS)
        self._trace = iter(zipf_trace(options.seed, _CHUNKS, _CHUNK_TOKENS, self._rounds * self._requests).requests)

    def claims(self) -> list[Claim]:
        return [
            Ratio(self.name, _POINT, "ttft_s", "stock", "warm"),
            Ratio(self.name, _POINT, "tpot_s", "warm", "stock"),
        ]

    def sizes(self) -> dict[str, Any]:
        return {
            "chunks": _CHUNKS,
            "chunks_per_request": CHUNKS_PER_REQUEST,
            "chunk_tokens": _CHUNK_TOKENS,
            "question_tokens": _QUESTION_TOKENS,
            "output_tokens": _OUTPUT_TOKENS,
            "rounds": self._rounds,
            "requests_per_round": self._requests,
        }

    def num_steps(self) -> int:
        return 2 * self._rounds

    async def run(self, servers: Servers, record: Record, step: Step) -> None:
        for number in range(self._rounds):
            for each in await self._round(servers, number, step):
                record(each)
        await (await servers.get(TESSERA)).clear(_NAMESPACE)

    async def _round(self, servers: Servers, number: int, step: Step) -> list[Sample]:
        """The same prompts to both systems, which take turns at being first."""
        queries = [self._query(request) for request in itertools.islice(self._trace, self._requests)]
        prompts = self._output / f"{self.name}-{number}.jsonl"
        _write(queries, prompts)
        await _cache_chunks(await servers.get(TESSERA), queries)
        order: list[tuple[System, str]] = [("stock", STOCK), ("warm", TESSERA)]
        samples = []
        for system, name in order if number % 2 == 0 else reversed(order):
            server = await servers.get(name)
            result = prompts.with_name(f"{self.name}-{number}-{system}.json")
            await _run_client(server, prompts, result, self._requests)
            samples.append(self._sample(system, number, result))
            await server.settle()
            step()
        return samples

    def _query(self, request: tuple[int, ...]) -> Query:
        chunks = tuple(self._chunks[chunk] for chunk in request)
        return Query("", chunks, self._texts.text(_QUESTION_TOKENS), _OUTPUT_TOKENS)

    def _sample(self, system: System, number: int, result: Path) -> Sample:
        measured = json.loads(result.read_text(encoding="utf-8"))
        if (measured["completed"], measured["failed"]) != (self._requests, 0):
            log = self._output / LOG
            raise BenchmarkError(f"vLLM's client (its log is {log}): {measured['failed']} requests failed on {system}")
        values = {"ttft_s": measured["median_ttft_ms"] / 1e3, "tpot_s": measured["median_tpot_ms"] / 1e3}
        return Sample(workload=self.name, point=_POINT, system=system, round=number, values=values)


def client_flags(server: Server, prompts: Path, result: Path, requests: int) -> list[str]:
    """Of `vllm bench serve`, for one pass over all ``prompts``.

    No warm-up: the client's own would be the first prompt, whose repeat vLLM's prefix cache then answers.
    """
    # Of "custom", the file is read by pandas, which vLLM does without; "custom_image" takes text all the same.
    dataset = ["--dataset-name", "custom_image", "--dataset-path", str(prompts), "--disable-shuffle"]
    sampling = ["--custom-output-len", str(_OUTPUT_TOKENS), "--temperature", "0", "--ignore-eos"]
    target = ["--backend", "openai-chat", "--base-url", server.process.url, "--endpoint", "/v1/chat/completions"]
    sizes = ["--num-prompts", str(requests), "--max-concurrency", "1", "--disable-tqdm"]
    saved = ["--save-result", "--result-dir", str(result.parent), "--result-filename", result.name]
    cache = {"mode": "chunked", "namespace": _NAMESPACE, "separator": _SEPARATOR}
    split = [] if server.is_stock else ["--extra-body", json.dumps({"cache": cache})]
    return [*target, *dataset, *sampling, *sizes, *saved, *split]


def _write(queries: list[Query], path: Path) -> None:
    """As `vllm bench serve` reads prompts: each a user message's content."""
    texts = (_SEPARATOR.join((*query.chunks, query.question)) for query in queries)
    lines = (json.dumps({"content": [{"type": "text", "text": text}]}) for text in texts)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


async def _cache_chunks(tessera: Server, queries: list[Query]) -> None:
    """Those of the queries, and no others."""
    await tessera.clear(_NAMESPACE)
    chunks = dict.fromkeys(chunk for query in queries for chunk in query.chunks)
    await tessera.ingest(Query("", tuple(chunks), "", _OUTPUT_TOKENS), _NAMESPACE)
    await tessera.settle()


async def _run_client(server: Server, prompts: Path, result: Path, requests: int) -> None:
    """Raises :class:`BenchmarkError` unless it succeeds, and, on Tessera, every chunk was found cached."""
    flags = client_flags(server, prompts, result, requests)
    if server.is_stock:
        return await _run(flags, prompts.with_name(LOG))
    before = await lookups(server)
    await _run(flags, prompts.with_name(LOG))
    found = Counter(await lookups(server)) - Counter(before)
    if found != {"hit": requests * CHUNKS_PER_REQUEST}:
        raise DifferentAnswerError(f"{server.name}: chunks were looked up as {dict(found)}, not all hit; not reporting")
    return None


async def _run(flags: list[str], log: Path) -> None:
    """The client, to its end; it dies with this task. What it prints is added to ``log``."""
    with log.open("ab") as output:
        process = await asyncio.create_subprocess_exec(*CLIENT, *flags, stdout=output, stderr=asyncio.subprocess.STDOUT)
    try:
        code = await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if code:
        raise BenchmarkError(f"vLLM's client exited with {code}; its log is {log}")
