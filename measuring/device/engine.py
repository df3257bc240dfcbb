# SPDX-License-Identifier: Apache-2.0
"""Tessera's server with a model on the device: as it is served, over HTTP, in processes of its own.

What ends the engine ends none of the other checks, and its memory is back on the device when it is stopped.
"""

from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import httpx

from measuring.device.findings import CheckError, Finding
from measuring.kit.client import ServerError
from measuring.kit.texts import Texts, characters_per_token
from measuring.speed.servers import TESSERA, Server, Servers
from tools.random_model import PRESETS, build_preset

_SELF_CHECK = "self-check failed"
_MAX_MODEL_LEN = "2560"


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Of the checks that ask an engine. ``model`` is a folder, or one of ``tools.random_model``'s presets."""

    model: str
    dtype: str
    output: Path
    tolerance: float
    flags: tuple[str, ...] = ()
    """More of vLLM's or Tessera's; they count if they are given twice."""

    @property
    def is_preset(self) -> bool:
        """Whether the model is built here."""
        return not Path(self.model).is_dir() and self.model in PRESETS

    def folder(self) -> Path:
        """The model's; raises ``OSError`` if it can't be built."""
        return build_preset(self.model, dtype=self.dtype) if self.is_preset else Path(self.model)

    def all_flags(self) -> tuple[str, ...]:
        """Memory is what is needed and no more: the device may have other work, and a small one will do."""
        blocks, pool = ("1G", "1GiB") if self.is_preset else ("4G", "4GiB")
        memory = ("--gpu-memory-utilization", "0.5", "--kv-cache-memory-bytes", blocks, "--chunk-cache-memory", pool)
        return ("--dtype", self.dtype, "--max-model-len", _MAX_MODEL_LEN, *memory, *self.flags)


class Engine:
    """Starts the server when a check first asks for it; an asynchronous context manager that stops it."""

    def __init__(self, options: EngineOptions) -> None:
        self.options = options
        self._stack = AsyncExitStack()
        self._servers: Servers | None = None
        self._folder: Path | None = None
        self._failure: Exception | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._stack.aclose()

    async def server(self) -> Server:
        """The server; raises the same error for everybody if it did not start."""
        if self._failure is not None:
            raise self._failure
        try:
            return await self._start()
        except (ServerError, OSError) as error:
            self._failure = CheckError(f"the engine did not start: {error}")
            raise self._failure from error

    async def caching_server(self) -> Server:
        """The server; raises :class:`CheckError` if its chunk cache is off."""
        if (reason := await self.reason()) is not None:
            raise CheckError(f"the chunk cache is off: {reason}")
        return await self.server()

    async def reason(self) -> str | None:
        """Why the chunk cache is off, if it is."""
        stats = await self.stats()
        return None if stats["enabled"] else str(stats["reason"])

    async def stats(self) -> dict[str, Any]:
        """The chunk cache's state."""
        server = await self.server()
        stats: dict[str, Any] = (await send(server, "GET", "/v1/cache/stats")).json()
        return stats

    def texts(self, check: str) -> Texts:
        """Texts that no other check has, sized for the model; once the server runs."""
        assert self._folder is not None
        return Texts(check, characters_per_token(self._folder))

    async def _start(self) -> Server:
        if self._servers is None:
            self._folder, output = self.options.folder(), self.options.output
            output.mkdir(parents=True, exist_ok=True)
            servers = Servers(str(self._folder), self.options.all_flags(), output)
            self._servers = await self._stack.enter_async_context(servers)
        return await self._servers.get(TESSERA)


async def send(server: Server, method: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
    """The answer to a request; raises :class:`CheckError` unless it is a good one."""
    try:
        return await server.request(method, path, body)
    except ServerError as error:
        raise CheckError(str(error)) from error


async def layout_probe(engine: Engine) -> Finding:
    """Whether the engine starts, and K and V were found in the memory of its layers."""
    version = await (await engine.server()).vllm_version()
    reason = await engine.reason()
    if reason is not None and not reason.startswith(_SELF_CHECK):
        raise CheckError(f"the chunk cache is off: {reason}")
    message = f"vLLM {version} started, K and V of every layer were found where its own writer puts them"
    return Finding(message, {"vllm": version, "flags": list(engine.options.all_flags())})


async def self_check(engine: Engine) -> Finding:
    """Whether what was loaded and turned is what the engine computes itself, in every layer."""
    reason = await engine.reason()
    if reason is not None:
        raise CheckError(reason if reason.startswith(_SELF_CHECK) else f"not reached, the chunk cache is off: {reason}")
    occupancy = (await engine.stats())["occupancy"]
    tokens = occupancy["pages_total"] * occupancy["page_tokens"]
    message = f"loaded KV is what the engine computes, in every layer; the cache is on, for {tokens} tokens"
    return Finding(message, {"pool_tokens": tokens})
