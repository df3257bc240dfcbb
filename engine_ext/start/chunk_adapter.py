# SPDX-License-Identifier: Apache-2.0
"""The adapter for writing (``--chunk-adapter``): a LoRA that runs only where a chunk's KV is computed.

`tessera adapt` makes its folder: an adapter as PEFT writes it, and a note about the model and the positions that it
was trained for. The engine reads a copy of its own, so that its digest is that of what runs, whatever happens to the
folder.
"""

import json
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, get_args

from safetensors import SafetensorError, safe_open
from vllm.config.lora import MaxLoRARanks
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.lora.request import LoRARequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from engine_ext.start.fingerprint import weights_digest
from engine_ext.start.support import UnsupportedFlagError
from engine_ext.start.weights import UnknownWeightsError, files_digest

NOTE: Final = "adapted.json"
"""Tessera's note in the folder: how the adapter was trained, for which ``positions``, and the model's ``weights``."""
_CONFIG: Final = "adapter_config.json"
_WEIGHTS: Final = "adapter_model.safetensors"
_NUMBER: Final = (1 << 31) - 1
"""vLLM counts users' adapters from 1 on."""


@dataclass(frozen=True, slots=True)
class ChunkAdapter:
    """An adapter for writing, in ``folder``, of which the engine has a ``copy``.

    ``digest`` is that of its two files, ``weights`` that of the files of the model that it is for
    (:func:`engine_ext.start.weights.files_digest`). ``modules`` are the last names of the matrices that it changes.
    """

    folder: Path
    copy: Path
    digest: str
    weights: str
    positions: tuple[str, ...]
    rank: int
    modules: frozenset[str]

    @classmethod
    def read(cls, folder: Path, copy: Path) -> "ChunkAdapter":
        """Copies a folder of `tessera adapt` to the new folder ``copy`` and reads it.

        Raises :class:`UnsupportedFlagError`.
        """
        copy.mkdir()
        try:
            note: Any = json.loads((folder / NOTE).read_bytes())
            for name in (_CONFIG, _WEIGHTS):
                shutil.copyfile(folder / name, copy / name)
            config: Any = json.loads((copy / _CONFIG).read_bytes())
            with safe_open(copy / _WEIGHTS, "pt") as tensors:
                modules = frozenset(name.split(".")[-3] for name in tensors.keys())  # noqa: SIM118
            rank = max(int(config["r"]), *(config.get("rank_pattern") or {}).values(), 1)
            return cls(folder, copy, files_digest(copy), note["weights"], tuple(note["positions"]), rank, modules)
        except OSError as error:
            raise _unusable(folder, f"{Path(error.filename or '').name}: {error.strerror}") from error
        except (SafetensorError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise _unusable(folder, f"it is no adapter of tessera adapt, or damaged ({error!r})") from error

    def enable(self, args: AsyncEngineArgs) -> None:
        """Lets vLLM run it beside users' own adapters; raises :class:`UnsupportedFlagError` for another model's."""
        try:
            weights = weights_digest(args.create_model_config(), args.create_load_config())
        except (UnknownWeightsError, OSError) as error:
            raise _unusable(self.folder, f"can't tell whether it is for this model: {error}") from error
        if weights != self.weights:
            raise _unusable(
                self.folder, "it was trained for another model: it needs the very files that it was trained on"
            )
        ranks: tuple[MaxLoRARanks, ...] = get_args(MaxLoRARanks)
        if self.rank > ranks[-1]:
            raise _unusable(self.folder, f"its rank is {self.rank}, and vLLM's largest is {ranks[-1]}")
        rank = min(rank for rank in ranks if rank >= self.rank)
        if not args.enable_lora:
            args.enable_lora, args.max_loras, args.max_cpu_loras = True, 1, None
            args.max_lora_rank, args.lora_target_modules = rank, sorted(self.modules)
            return
        args.max_loras += 1
        if args.max_cpu_loras is not None:
            args.max_cpu_loras += 1
        args.max_lora_rank = max(args.max_lora_rank, rank)
        if args.lora_target_modules is not None:
            args.lora_target_modules = sorted({*args.lora_target_modules, *self.modules})

    async def load(self, llm: AsyncLLM) -> LoRARequest:
        """Loads it into the engine; returns what requests that run with it carry.

        Raises :class:`UnsupportedFlagError`.
        """
        # vLLM tells adapters apart by name; nobody can guess this one.
        request = LoRARequest(f"tessera-chunks-{secrets.token_hex(8)}", _NUMBER, str(self.copy))
        try:
            await llm.add_lora(request)
        except EngineDeadError:
            raise
        except Exception as error:  # of many types, from the workers
            raise _unusable(self.folder, f"vLLM can't load it: {error}") from error
        return request


def _unusable(folder: Path, why: str) -> UnsupportedFlagError:
    return UnsupportedFlagError(f"--chunk-adapter {folder}: {' '.join(why.split())}")
