# SPDX-License-Identifier: Apache-2.0
"""Identity of a LoRA adapter's weights, so that reloaded adapters don't reuse old KV."""

import asyncio
import os
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from vllm.lora.utils import get_adapter_absolute_path

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

FileState = tuple[str, int, int, int]
"""Name, inode, bytes and time of the last change in nanoseconds."""


@dataclass(frozen=True, slots=True)
class _Loaded:
    """Number of loads of an adapter, and its files before the last load."""

    times: int
    folder: str
    files: list[FileState]


class Adapters:
    """The engine's LoRA adapters, by vLLM's number of each.

    vLLM may read the files of an adapter again if it was unused for long. So chunks are not reused behind an adapter
    whose files changed since it was loaded.
    """

    def __init__(self) -> None:
        self._loaded: dict[int, _Loaded] = {}
        self._process = secrets.token_hex(8)

    async def load(self, lora: "LoRARequest", add_lora: "Callable[[LoRARequest], Awaitable[bool]]") -> bool:
        """Loads an adapter with ``add_lora``, and invalidates KV computed with it before.

        Later requests carry ``lora``, which no longer makes vLLM read the files before every step.
        """
        before = self._loaded.get(lora.lora_int_id)
        folder = await asyncio.to_thread(get_adapter_absolute_path, lora.lora_path)
        loaded = _Loaded(before.times + 1 if before else 1, folder, _files(folder))
        try:
            added = await add_lora(lora)
        except BaseException:
            if before is not None:  # the old one remains in all or some workers
                self._loaded[lora.lora_int_id] = replace(before, times=loaded.times)
            raise
        self._loaded[lora.lora_int_id] = loaded
        lora.load_inplace = False
        return added

    def name(self, lora: "LoRARequest") -> str:
        """Identifies an adapter's weights, in this process alone."""
        loaded = self._loaded.get(lora.lora_int_id)
        return f"{self._process}.{lora.lora_int_id}.{loaded.times if loaded else 0}"

    def reason(self, lora: "LoRARequest") -> str | None:
        """The reason why the weights of ``lora`` are unknown, if they are."""
        loaded = self._loaded.get(lora.lora_int_id)
        if loaded is None:
            return f"the adapter {lora.lora_name} was not loaded by this server"
        if _files(loaded.folder) != loaded.files:
            return f"files of the adapter {lora.lora_name} changed since it was loaded"
        return None


def _files(folder: str) -> list[FileState]:
    """The files in a folder; none if it does not exist."""
    try:
        entries = [(entry.name, entry.stat()) for entry in os.scandir(folder)]
    except OSError:
        return []
    return sorted((name, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in entries)
