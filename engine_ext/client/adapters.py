# SPDX-License-Identifier: Apache-2.0
"""Which weights a LoRA adapter has: what is loaded over an adapter must not meet the old one's KV."""

import asyncio
import os
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
    """How many times an adapter was loaded, and its files when that began last."""

    times: int
    folder: str
    files: list[FileState]


class Adapters:
    """The engine's LoRA adapters, by vLLM's number of each.

    vLLM may read an adapter's files again at any time, when it has not been used for long. So chunks are not reused
    behind an adapter whose files are others than when it was loaded.
    """

    def __init__(self) -> None:
        self._loaded: dict[int, _Loaded] = {}

    async def load(self, lora: "LoRARequest", add_lora: "Callable[[LoRARequest], Awaitable[bool]]") -> bool:
        """Has ``add_lora`` load an adapter; what was computed with it until then is not found from then on.

        ``lora`` is what further requests carry. They don't ask vLLM to read the files anew before every step any more.
        """
        before = self._loaded.get(lora.lora_int_id)
        folder = await asyncio.to_thread(get_adapter_absolute_path, lora.lora_path)
        loaded = _Loaded(before.times + 1 if before else 1, folder, _files(folder))
        try:
            added = await add_lora(lora)
        except BaseException:
            if before is not None:  # the old one remains, or some of the workers have it
                self._loaded[lora.lora_int_id] = replace(before, times=loaded.times)
            raise
        self._loaded[lora.lora_int_id] = loaded
        lora.load_inplace = False
        return added

    def name(self, lora: "LoRARequest | None") -> str:
        """What tells an adapter's weights, in this process, from all others and from the base model (empty)."""
        if lora is None:
            return ""
        loaded = self._loaded.get(lora.lora_int_id)
        return f"{lora.lora_int_id}.{loaded.times if loaded else 0}"

    def reason(self, lora: "LoRARequest | None") -> str | None:
        """Why it is not known which weights ``lora`` is computed with; ``None`` if it is."""
        if lora is None:
            return None
        loaded = self._loaded.get(lora.lora_int_id)
        if loaded is None:
            return f"the adapter {lora.lora_name} was not loaded by this server"
        if _files(loaded.folder) != loaded.files:
            return f"files of the adapter {lora.lora_name} changed since it was loaded"
        return None


def _files(folder: str) -> list[FileState]:
    """The files in a folder; none, if there is no such folder."""
    try:
        entries = [(entry.name, entry.stat()) for entry in os.scandir(folder)]
    except OSError:
        return []
    return sorted((name, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in entries)
