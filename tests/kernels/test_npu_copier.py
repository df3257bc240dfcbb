# SPDX-License-Identifier: Apache-2.0
"""Costs and refusals of the copier on Ascend's operators; `test_copiers.py` tests its effect."""

import sys
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kernels import dispatch
from kernels.paged import UnsupportedKVError
from kernels.reference import frequencies
from tests.kernels.copiers import npu_copier
from tests.kernels.fake_npu import DEVICE_OPERATORS, FakeTorchNpu
from tests.kernels.fakes import PAIR, Shape
from tests.kernels.spans import Memory


class Operators(TorchDispatchMode):
    """Counts torch's operators that run within."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **kwargs or {})


@pytest.mark.parametrize(("deltas", "rotations", "selections"), [([0, 0], 0, 0), ([3, 5], 2, 0), ([0, 5], 2, 2)])
def test_only_what_turns_costs_a_rotation(deltas, rotations, selections, monkeypatch):
    """Of two layers; a selection takes the tokens that stay from the keys as they were."""
    calls = []

    class Counting(FakeTorchNpu):
        def npu_rotary_mul(self, *args: Any, **kwargs: Any) -> Tensor:
            calls.append(1)
            return super().npu_rotary_mul(*args, **kwargs)

    monkeypatch.setitem(sys.modules, "torch_npu", Counting())
    memory = Memory.poisoned(PAIR, Shape(4, 16, 2, 32), torch.float32, [frequencies(32)] * 2)
    memory.randomize("key_pool", "value_pool")
    copier = npu_copier(memory.layers)
    with Operators() as operators:
        copier.load(torch.arange(2), torch.arange(2), torch.tensor(deltas))
    assert (len(calls), operators.counts["where"]) == (rotations, selections)


def test_npus_are_served_by_the_operators_and_interleaved_memory_is_refused(monkeypatch):
    memory = Memory.poisoned("BNH2D", Shape(4, 16, 2, 32), torch.float32, [frequencies(32)])
    with pytest.raises(UnsupportedKVError, match=r"strides .*\(ND\)"):
        npu_copier(memory.layers)
    monkeypatch.setattr(dispatch, "_device", lambda _: SimpleNamespace(type="npu"))  # torch has no such device here
    memory = Memory.poisoned(PAIR, Shape(4, 16, 2, 32), torch.float32, [frequencies(32)])
    copier = dispatch.copier_for(memory.layers, DEVICE_OPERATORS["A2"](FakeTorchNpu()).reshape_and_cache)
    assert copier.name == "torch_npu"
    with pytest.raises(UnsupportedKVError, match="writer is needed"):
        dispatch.copier_for(memory.layers)
