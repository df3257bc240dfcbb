# SPDX-License-Identifier: Apache-2.0
"""Copiers that run on a CPU; Triton's in its interpreter (`conftest.py`)."""

from collections.abc import Callable, Sequence

from kernels.numba_copier import NumbaCopier
from kernels.paged import KVCopier, LayerKV
from kernels.torch_copier import TorchCopier
from tests.kernels.fakes import AMX, LAYOUTS, MLA


def triton_copier(layers: Sequence[LayerKV]) -> KVCopier:
    from kernels.triton_copier import TritonCopier

    return TritonCopier(layers)


COPIERS: dict[str, Callable[[Sequence[LayerKV]], KVCopier]] = {
    "torch": TorchCopier,
    "numba": NumbaCopier,
    "triton": triton_copier,
}
LAYOUTS_OF = {"torch": (*LAYOUTS, MLA, AMX), "numba": ("cpu", AMX), "triton": (*LAYOUTS, MLA)}
EXAMPLES = {"torch": 40, "numba": 60, "triton": 120}
