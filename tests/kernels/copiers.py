# SPDX-License-Identifier: Apache-2.0
"""Copiers that run on a CPU: Triton's in its interpreter (`conftest.py`), Ascend's on fake operators."""

from collections.abc import Callable, Sequence
from functools import partial

from kernels.npu_copier import NpuCopier
from kernels.numba_copier import NumbaCopier
from kernels.paged import KVCopier, LayerKV
from kernels.torch_copier import TorchCopier
from tests.kernels.fakes import AMX, LAYOUTS, MLA, PAIR


def triton_copier(layers: Sequence[LayerKV]) -> KVCopier:
    from kernels.triton_copier import TritonCopier

    return TritonCopier(layers)


def npu_copier(layers: Sequence[LayerKV], device: str = "A2") -> KVCopier:
    from tests.kernels.fake_npu import DEVICE_OPERATORS, FakeTorchNpu  # imports vLLM

    return NpuCopier(layers, DEVICE_OPERATORS[device](FakeTorchNpu()).reshape_and_cache)


COPIERS: dict[str, Callable[[Sequence[LayerKV]], KVCopier]] = {
    "torch": TorchCopier,
    "numba": NumbaCopier,
    "triton": triton_copier,
    "npu A2": npu_copier,
    "npu A5": partial(npu_copier, device="A5"),
}
LAYOUTS_OF = {"torch": (*LAYOUTS, MLA, AMX), "numba": ("cpu", AMX), "triton": (*LAYOUTS, MLA)}
LAYOUTS_OF |= dict.fromkeys(("npu A2", "npu A5"), (PAIR,))
EXAMPLES = {"torch": 40, "triton": 120}
"""Of each copier; by default 60."""
