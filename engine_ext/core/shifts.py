# SPDX-License-Identifier: Apache-2.0
"""Shifts of token positions by block, in a worker, before the model runs.

vLLM gives each token its index in the sequence as its position. Behind a composition the position must be earlier
(:mod:`engine_ext.core.block_hashes`). A table in the device's memory has the shift of each block, and a wrapper of the
model's class subtracts it from the positions: a few operations of fixed shape, in front of the compiled graph.
"""

import functools
import importlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.model_executor.models import ModelRegistry


def shift_reason(config: VllmConfig) -> str | None:
    """The reason why tokens behind shared blocks can't be computed at earlier positions, if any."""
    checks: list[tuple[Any, str]] = [
        (config.speculative_config, "a model that drafts tokens would see them at other positions"),
        (config.model_config.uses_mrope, "positions in three dimensions (M-RoPE) are not shifted"),
        (config.model_config.enable_sleep_mode, "sleep mode may discard the shifts of blocks"),
        (config.parallel_config.enable_dbo, "--enable-dbo splits a step's tokens"),
        (
            config.compilation_config.cudagraph_mode.has_full_cudagraphs(),
            'not proven with full CUDA graphs (--compilation-config \'{"cudagraph_mode": "PIECEWISE"}\' has none)',
        ),
    ]
    return next((reason for holds, reason in checks if holds), None)


class ShiftTable:
    """The shift of each block, int64 ``[num_blocks]``, for steps of up to ``max_tokens`` tokens."""

    def __init__(self, num_blocks: int, block_tokens: int, max_tokens: int, device: torch.device) -> None:
        self._shifts = torch.zeros(num_blocks, dtype=torch.int64, device=device)
        # One buffer for all steps: piecewise CUDA graphs read the address at which they were captured.
        self._positions = torch.zeros(max_tokens, dtype=torch.int64, device=device)
        self._block_tokens = block_tokens

    def update(self, changes: Mapping[int, int]) -> None:
        """Sets the shifts of some blocks."""
        blocks = torch.tensor(list(changes), dtype=torch.int64)
        self._shifts[blocks.to(self._shifts.device)] = torch.tensor(list(changes.values())).to(self._shifts.device)

    def shifted(self, positions: Tensor, slots: Tensor) -> Tensor:
        """``positions`` minus the shifts of the tokens' ``slots``.

        ``positions`` is int64 ``[n]``, ``slots`` int ``[m]`` with ``m <= n``. The result is valid until the next call.
        """
        shifted = self._positions[: len(positions)].copy_(positions)
        shifted[: len(slots)] -= self._shifts[slots.clamp(min=0) // self._block_tokens]
        return shifted


_table: ShiftTable | None = None


def install_table(table: ShiftTable) -> None:
    """Shifts the positions of this process's model by ``table``."""
    global _table  # the model's class has no other access to it
    _table = table


def register_shifted_models(architectures: Iterable[str]) -> None:
    """Registers wrapped classes for these models with vLLM, in this process."""
    for architecture in architectures:
        known = ModelRegistry.models.get(architecture)
        module, name = getattr(known, "module_name", None), getattr(known, "class_name", None)
        if module and name and module != __name__:
            ModelRegistry.register_model(architecture, f"{__name__}:{module}.{name}")


def __getattr__(name: str) -> Any:
    """A model's class, wrapped, by the name ``module.Class``, which vLLM's registry imports."""
    module, _, class_name = name.rpartition(".")
    if not module:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _wrapped(getattr(importlib.import_module(module), class_name))


def _slots() -> Tensor | None:
    """The slots of this step's tokens; ``None`` in vLLM's run that measures memory."""
    mapping = get_forward_context().slot_mapping if is_forward_context_available() else None
    return next(iter(mapping.values())) if isinstance(mapping, dict) and mapping else None


@functools.cache
def _wrapped(model: type[Any]) -> type[Any]:
    forward = model.forward

    @functools.wraps(forward)
    def shifted_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        slots = _slots() if _table is not None else None
        if _table is not None and slots is not None:
            if "positions" in kwargs:
                kwargs["positions"] = _table.shifted(kwargs["positions"], slots)
            else:
                args = (args[0], _table.shifted(args[1], slots), *args[2:])
        return forward(self, *args, **kwargs)

    return type(model.__name__, (model,), {"forward": shifted_forward, "__module__": __name__})
