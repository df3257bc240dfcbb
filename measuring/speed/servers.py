# SPDX-License-Identifier: Apache-2.0
"""The compared servers, with one model and the same flags, started on first use."""

import argparse
import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from prometheus_client.parser import text_string_to_metric_families

from machine.progress import say
from machine.server_process import TESSERA_SERVE, ServerProcess
from measuring.kit.client import Answer, Client, ServerError
from measuring.kit.servers import stop, wait_ready
from measuring.speed.query import Query

STOCK, TESSERA = "stock", "tessera"
"""Stock vLLM has the first name. Servers of all others are Tessera's."""
VLLM_SERVE = ("engine_ext.start.vllm_command", "serve")
SETTLE_S = 1.2
"""After their last step, an engine's processes occupy a core for a second (vLLM's ``SpinCondition``)."""
_TOP_LOGPROBS = 5
_CHUNK_CACHE_MEMORY = "2GiB"
"""Tessera's pool, unless a flag or the environment says otherwise; it holds each workload's chunks."""


@dataclass(frozen=True, slots=True)
class Pool:
    """A chunk pool: pages, free pages, and the size of a page."""

    pages: int
    free: int
    page_tokens: int
    page_bytes: int
    """On all workers together."""

    def pages_for(self, tokens: int) -> int:
        """Pages that a chunk takes."""
        return -(-tokens // self.page_tokens)


class Server(Client):
    """A running server. Its methods raise :class:`ServerError`, naming the server and its log.

    ``name`` is for messages, ``is_stock`` tells vLLM from Tessera. Tokens whose log probabilities differ by at most
    ``tie`` are equally likely.
    """

    def __init__(self, name: str, process: ServerProcess, *, is_stock: bool, tie: float) -> None:
        super().__init__(process.url, f"{name} (its log is {process.log})")
        self.name = name
        self.is_stock = is_stock
        self.tie = tie

    async def ask(self, query: Query, namespace: str = "default") -> Answer:
        """The answer to ``query``, streamed."""
        answer = await self.stream(*self._request(query, namespace))
        if answer.ttft_s is None:
            raise ServerError(f"{self.label} failed: no token arrived")
        return answer

    async def token_logprobs(self, query: Query, namespace: str = "default") -> list[dict[str, Any]]:
        """The answer's tokens with the likeliest ones' log probabilities, in OpenAI's format."""
        path, body = self._request(query, namespace)
        del body["stream"], body["stream_options"]
        answer = await self.post(path, {**body, "logprobs": True, "top_logprobs": _TOP_LOGPROBS})
        tokens: list[dict[str, Any]] = answer["choices"][0]["logprobs"]["content"]
        return tokens

    async def ingest(self, query: Query, namespace: str = "default") -> None:
        """Computes the query's chunks ahead of time; raises :class:`ServerError` unless all are cached."""
        body = {"system": query.system, "chunks": list(query.chunks), "cache": {"namespace": namespace}}
        lines = [line async for line in self.lines("/v1/rag/chunks", body)]
        if lines[-1]["summary"]["failed"]:
            raise ServerError(f"{self.label} failed: chunks could not be computed ahead: {lines[-1]}")

    async def clear(self, namespace: str) -> None:
        """Removes everything that Tessera has cached in this namespace."""
        await self.post("/v1/cache/clear", {"namespace": namespace})

    async def vllm_version(self) -> str:
        """The engine's version."""
        return str((await self.get("/version"))["version"])

    async def pool(self) -> Pool:
        """The chunk pool; raises :class:`ServerError` if the chunk cache is off."""
        stats = await self.get("/v1/cache/stats")
        if not stats["enabled"]:
            raise ServerError(f"{self.label}: the chunk cache is off: {stats['reason']}")
        metrics = (await self.request("GET", "/metrics")).text
        families = text_string_to_metric_families(metrics)
        values = {sample.name: sample.value for family in families for sample in family.samples}
        occupancy, size_bytes = stats["occupancy"], int(values["tessera_pool_bytes"])
        pages = occupancy["pages_total"]
        return Pool(pages, occupancy["pages_free"], occupancy["page_tokens"], size_bytes // pages)

    async def settle(self) -> None:
        """Waits until the engine's processes no longer spin."""
        await asyncio.sleep(SETTLE_S)

    def _request(self, query: Query, namespace: str) -> tuple[str, dict[str, Any]]:
        """Path and body. A query without chunks is ordinary chat for both systems."""
        if self.is_stock or not query.chunks:
            return "/v1/chat/completions", query.stock_body()
        return "/v1/rag/chat", query.tessera_body(namespace)


@asynccontextmanager
async def running(
    name: str, model: str, flags: Sequence[str], folder: Path, *, is_stock: bool
) -> AsyncIterator[Server]:
    """A server for the time of the block; its log is ``folder/name.log``. Raises :class:`ServerError`."""
    # By default vLLM reserves one core, and two beside a KV connector: not the same engine on both sides.
    # Nor does it log as little as Tessera.
    defaults = {
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "TESSERA_CHUNK_CACHE_MEMORY": _CHUNK_CACHE_MEMORY,
    }
    log, serve = folder / f"{name}.log", VLLM_SERVE if is_stock else TESSERA_SERVE
    process = ServerProcess(log, model, *flags, environment={**defaults, **os.environ}, serve=serve)
    try:
        await asyncio.to_thread(wait_ready, process, name)
        async with Server(name, process, is_stock=is_stock, tie=_tie(flags)) as server:
            yield server
    finally:
        await asyncio.to_thread(stop, process)


def _tie(flags: Sequence[str]) -> float:
    """The error of log probabilities by dtype. In bfloat16, logits from 16 to 32 are multiples of 1/8."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--dtype")
    return 1e-3 if parser.parse_known_args(flags)[0].dtype == "float32" else 0.25


class Servers:
    """Servers of one model and the same flags; an asynchronous context manager stops them."""

    def __init__(self, model: str, flags: Sequence[str], folder: Path) -> None:
        self._model = model
        self._flags = tuple(flags)
        self._folder = folder
        self._running: dict[str, tuple[Server, AsyncExitStack]] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        async with AsyncExitStack() as every:
            for _server, stack in self._running.values():
                every.push_async_exit(stack)
            self._running.clear()

    async def get(self, name: str, *extra: str) -> Server:
        """The server, started with ``extra`` flags if necessary; raises :class:`ServerError`."""
        if name not in self._running:
            say(f"starting {name} …")
            stack = AsyncExitStack()
            starting = running(name, self._model, (*self._flags, *extra), self._folder, is_stock=name == STOCK)
            self._running[name] = (await stack.enter_async_context(starting), stack)
        return self._running[name][0]

    async def close(self, name: str) -> None:
        """Stops the server of this name, if it runs."""
        if name in self._running:
            _, stack = self._running.pop(name)
            await stack.aclose()
