# SPDX-License-Identifier: Apache-2.0
"""Tessera's server with a model on the device, over HTTP, in processes of its own.

An error that ends the engine ends none of the other checks, and its memory is back on the device when it is stopped.
"""

from contextlib import AsyncExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from app.models.random_model import PRESETS, build_preset
from research.device.findings import SkippedError

if TYPE_CHECKING:
    from measuring.kit.texts import Texts
    from measuring.speed.servers import Server, Servers

TOLERANCES = {"bfloat16": 5e-2, "float16": 1e-2, "float32": 1e-4}
"""Largest difference of log probabilities, by the model's dtype."""
_MAX_MODEL_LEN = "2560"


def absent_packages() -> list[str]:
    """Packages that a server and its client need and that are not installed."""
    needed = ("vllm", "transformers", "tokenizers", "pydantic", "httpx", "prometheus_client")
    return [name for name in needed if find_spec(name) is None]


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Options of the checks that ask an engine. ``model`` is a folder or a preset of ``app.models.random_model``."""

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
        """All flags of the server, with little memory: the device may have other work."""
        blocks, pool = ("1G", "1GiB") if self.is_preset else ("4G", "4GiB")
        memory = ("--gpu-memory-utilization", "0.5", "--kv-cache-memory-bytes", blocks, "--chunk-cache-memory", pool)
        return ("--dtype", self.dtype, "--max-model-len", _MAX_MODEL_LEN, *memory, *self.flags)


class Engine:
    """Starts the server on first use; an asynchronous context manager that stops it."""

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

    async def server(self) -> "Server":
        """The server; raises :class:`SkippedError`, or the same ``OSError`` or ``ServerError`` for everybody."""
        if absent := absent_packages():
            raise SkippedError(f"needs {', '.join(absent)}")
        from measuring.kit.client import ServerError

        if self._failure is not None:
            raise self._failure
        try:
            return await self._start()
        except (ServerError, OSError) as error:
            self._failure = error
            raise

    def texts(self, check: str) -> "Texts":
        """Texts that no other check has, sized for the model; once the server runs."""
        from measuring.kit.texts import Texts, characters_per_token

        assert self._folder is not None
        return Texts(check, characters_per_token(self._folder))

    async def _start(self) -> "Server":
        from measuring.speed.servers import TESSERA, Servers

        if self._servers is None:
            self._folder, output = self.options.folder(), self.options.output
            output.mkdir(parents=True, exist_ok=True)
            servers = Servers(str(self._folder), self.options.all_flags(), output)
            self._servers = await self._stack.enter_async_context(servers)
        return await self._servers.get(TESSERA)
