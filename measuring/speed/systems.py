# SPDX-License-Identifier: Apache-2.0
"""The servers that are compared: the same model with the same flags, one beside the other."""

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from http import HTTPStatus
from pathlib import Path
from typing import Any

import httpx

from measuring.speed.rag import Answer, BenchmarkError, Query, ask
from tools.server_process import TESSERA_SERVE, ServerProcess, last_words

VLLM_SERVE = ("engine_ext.start.vllm_command", "serve")
SETTLE_S = 1.2
"""An engine's processes spin for a second after their last step (vLLM's ``SpinCondition``), and would take a core from
the server that is measured next."""
_TIMEOUT = httpx.Timeout(1800, connect=10)
_TOP_LOGPROBS = 5
_CHUNK_CACHE_MEMORY = "2GiB"
"""Tessera's pool, unless a flag or the environment says otherwise; it holds each workload's chunks."""


class Server:
    """A running server with an asynchronous client. Its methods raise :class:`BenchmarkError`, naming its log.

    ``name`` is for messages, ``is_stock`` tells vLLM from Tessera.
    """

    def __init__(self, name: str, process: ServerProcess, *, is_stock: bool) -> None:
        self.name = name
        self.process = process
        self.is_stock = is_stock
        self.http = httpx.AsyncClient(base_url=process.url, timeout=_TIMEOUT, limits=httpx.Limits(max_connections=None))

    async def ask(self, query: Query, namespace: str = "default") -> Answer:
        """The answer to ``query``, streamed."""
        with self._named_failures():
            return await ask(self.http, *self._request(query, namespace))

    async def token_logprobs(self, query: Query, namespace: str = "default") -> list[dict[str, Any]]:
        """The tokens of the answer to ``query``, with the log probabilities of the likeliest, as OpenAI has them."""
        path, body = self._request(query, namespace)
        del body["stream"], body["stream_options"]
        answer = await self._post(path, {**body, "logprobs": True, "top_logprobs": _TOP_LOGPROBS})
        tokens: list[dict[str, Any]] = answer.json()["choices"][0]["logprobs"]["content"]
        return tokens

    async def ingest(self, query: Query, namespace: str = "default") -> None:
        """Has the query's chunks computed ahead of time; an error unless all are cached."""
        chunks = list(query.chunks)
        body = {"system": query.system, "chunks": chunks, "cache": {"namespace": namespace}}
        lines = (await self._post("/v1/rag/chunks", body)).text.splitlines()
        if '"failed": 0' not in lines[-1]:
            raise BenchmarkError(f"{self.name}: chunks could not be computed ahead: {lines[-1][-500:]}")

    async def clear(self, namespace: str) -> None:
        """Drops what Tessera has cached in this namespace."""
        await self._post("/v1/cache/clear", {"namespace": namespace})

    async def vllm_version(self) -> str:
        """Of the engine."""
        with self._named_failures():
            return str((await self.http.get("/version")).json()["version"])

    async def settle(self) -> None:
        """Waits until the engine's processes no longer spin."""
        await asyncio.sleep(SETTLE_S)

    def _request(self, query: Query, namespace: str) -> tuple[str, dict[str, Any]]:
        """Path and body. What has no chunks is ordinary chat for both systems."""
        if self.is_stock or not query.chunks:
            return "/v1/chat/completions", query.stock_body()
        return "/v1/rag/chat", query.tessera_body(namespace)

    async def _post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        with self._named_failures():
            response = await self.http.post(path, json=body)
            if response.status_code != HTTPStatus.OK:
                raise BenchmarkError(f"{path}: {response.status_code}: {response.text[-500:]}")
            return response

    @contextmanager
    def _named_failures(self) -> Iterator[None]:
        try:
            yield
        except (BenchmarkError, httpx.HTTPError) as error:
            words = str(error) or type(error).__name__
            raise BenchmarkError(f"{self.name} failed (its log is {self.process.log}): {words}") from error


@asynccontextmanager
async def running(
    name: str, model: str, flags: Sequence[str], folder: Path, *, is_stock: bool
) -> AsyncIterator[Server]:
    """A server for the time of the block; its log is ``folder/name.log``. Raises :class:`BenchmarkError`."""
    # Unless told otherwise vLLM reserves one core, and two beside a KV connector: not the same engine on both sides.
    # Nor does it log as little as Tessera.
    defaults = {
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "TESSERA_CHUNK_CACHE_MEMORY": _CHUNK_CACHE_MEMORY,
    }
    log, serve = folder / f"{name}.log", VLLM_SERVE if is_stock else TESSERA_SERVE
    process = ServerProcess(log, model, *flags, environment={**defaults, **os.environ}, serve=serve)
    try:
        await asyncio.to_thread(_wait_ready, process, name)
        server = Server(name, process, is_stock=is_stock)
        async with server.http:
            yield server
    finally:
        # Raised when it had to be killed; nothing hangs on how it ended.
        with suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(process.stop)


def _wait_ready(process: ServerProcess, name: str) -> None:
    try:
        process.wait_ready()
    except (RuntimeError, TimeoutError) as error:
        raise BenchmarkError(f"{name} did not start (its log is {process.log}): {last_words(process.log)}") from error
