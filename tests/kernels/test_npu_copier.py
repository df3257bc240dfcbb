# SPDX-License-Identifier: Apache-2.0
"""The copier on Ascend's operators: equal to the reference, with valid calls only."""

import sys
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kernels import dispatch
from kernels.npu_copier import NpuCopier
from kernels.paged import UnsupportedKVError
from kernels.reference import frequencies
from tests.kernels.fake_npu import (
    DEVICE_OPERATORS,
    ContractError,
    FakeCudaEvent,
    FakeStreams,
    FakeTorchNpu,
)
from tests.kernels.fakes import PAIR, Shape
from tests.kernels.spans import Memory, assert_loaded, assert_saved, cases

FAST = settings(
    derandomize=True,
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


@pytest.fixture(autouse=True)
def npu(monkeypatch: pytest.MonkeyPatch) -> FakeTorchNpu:
    """Fake operators, with streams and events that must not be used."""
    fake = FakeTorchNpu()
    monkeypatch.setitem(sys.modules, "torch_npu", fake)
    monkeypatch.setattr(torch, "npu", FakeStreams(), raising=False)
    monkeypatch.setattr(torch.cuda, "Event", FakeCudaEvent)
    return fake


@pytest.mark.parametrize("device", DEVICE_OPERATORS)
def test_spans_are_saved_and_loaded_as_the_reference_does(device: str, npu: FakeTorchNpu) -> None:
    write = DEVICE_OPERATORS[device](npu).reshape_and_cache

    @FAST
    @given(cases((PAIR,)))
    def check(case) -> None:
        memory = case.memory("key_pool", "value_pool")
        assert_loaded(NpuCopier(memory.layers, write), memory, case)
        memory = case.memory("key_blocks", "value_blocks")
        assert_saved(NpuCopier(memory.layers, write), memory, case.slots, case.rows)

    check()


def loaded(npu: FakeTorchNpu, device: str) -> None:
    memory = Memory.poisoned(PAIR, Shape(4, 16, 2, 32), torch.float32, [frequencies(32)])
    memory.randomize("key_pool", "value_pool")
    copier = NpuCopier(memory.layers, DEVICE_OPERATORS[device](npu).reshape_and_cache)
    copier.load(torch.arange(6), torch.arange(6), torch.full((6,), 3))


class Operators(TorchDispatchMode):
    """Counts torch's operators that run within."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **kwargs or {})


@pytest.mark.parametrize(("deltas", "rotations", "selections"), [([0, 0], 0, 0), ([3, 5], 2, 0), ([0, 5], 2, 2)])
def test_only_what_turns_costs_a_rotation(
    deltas: list[int], rotations: int, selections: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two layers; a selection takes the tokens that stay from the keys as they were."""
    calls = []

    class Counting(FakeTorchNpu):
        def npu_rotary_mul(self, *args: Any, **kwargs: Any) -> Tensor:
            calls.append(1)
            return super().npu_rotary_mul(*args, **kwargs)

    monkeypatch.setitem(sys.modules, "torch_npu", Counting())
    memory = Memory.poisoned(PAIR, Shape(4, 16, 2, 32), torch.float32, [frequencies(32)] * 2)
    memory.randomize("key_pool", "value_pool")
    copier = NpuCopier(memory.layers, DEVICE_OPERATORS["A2"](FakeTorchNpu()).reshape_and_cache)
    with Operators() as operators:
        copier.load(torch.arange(2), torch.arange(2), torch.tensor(deltas))
    assert (len(calls), operators.counts["where"]) == (rotations, selections)


def strided(tensor: Tensor) -> Tensor:
    """The same values with gaps between them."""
    return torch.stack((tensor, tensor), dim=-1)[..., 0]


Mutation = Callable[[dict[str, Any]], dict[str, Any]]
WRITES: dict[str, Mutation] = {
    "int64 slots": lambda call: {**call, "slots": call["slots"].long()},
    "float slots": lambda call: {**call, "slots": call["slots"].float()},
    "slots in steps": lambda call: {**call, "slots": strided(call["slots"])},
    "a slot twice": lambda call: {**call, "slots": torch.zeros_like(call["slots"])},
    "a slot outside": lambda call: {**call, "slots": call["slots"] + 64},
    "a slot too few": lambda call: {**call, "slots": call["slots"][:-1]},
    "strided keys": lambda call: {**call, "key": strided(call["key"])},
    "strided values": lambda call: {**call, "value": strided(call["value"])},
    "keys of another dtype": lambda call: {**call, "key": call["key"].half()},
    "half of the heads": lambda call: {**call, "value": call["value"][:, :1].contiguous()},
    "a strided cache": lambda call: {**call, "key_cache": strided(call["key_cache"])},
    "a flat cache": lambda call: {**call, "value_cache": call["value_cache"].flatten(0, 1)},
}
ROTATIONS: dict[str, Mutation] = {
    "three dimensions": lambda call: {**call, "input": call["input"][0]},
    "cos of another dtype": lambda call: {**call, "r1": call["r1"].half()},
    "keys of another dtype": lambda call: {**call, "input": call["input"].half()},
    "cos of half the width": lambda call: {**call, "r1": call["r1"][..., :16]},
    "sin of one token": lambda call: {**call, "r2": call["r2"][:, :1]},
    "cos beyond 1": lambda call: {**call, "r1": call["r1"] * 3},
    "sin below -1": lambda call: {**call, "r2": call["r2"] * -30},
    "an unknown mode": lambda call: {**call, "rotary_mode": "neox"},
}


@pytest.mark.parametrize("mutation", [name for name in WRITES if name != "int64 slots"])
@pytest.mark.parametrize("device", DEVICE_OPERATORS)
def test_a_wrong_write_is_noticed(mutation: str, device: str) -> None:
    class Mutated(FakeTorchNpu):
        def _npu_reshape_and_cache(self, slot_indices: Tensor, **call: Any) -> None:
            call = WRITES[mutation]({**call, "slots": slot_indices})
            super()._npu_reshape_and_cache(slot_indices=call.pop("slots"), **call)

        def npu_scatter_pa_kv_cache(self, slot_mapping: Tensor, *, cache_mode: str = "PA_NZ", **call: Any) -> None:
            call = WRITES[mutation]({**call, "slots": slot_mapping})
            super().npu_scatter_pa_kv_cache(slot_mapping=call.pop("slots"), cache_mode=cache_mode, **call)

    with pytest.raises(ContractError):
        loaded(Mutated(), device)


def test_int64_slots_are_noticed_where_they_are_misread() -> None:
    class Mutated(FakeTorchNpu):
        def _npu_reshape_and_cache(self, slot_indices: Tensor, **call: Any) -> None:
            super()._npu_reshape_and_cache(slot_indices=slot_indices.long(), **call)

    with pytest.raises(ContractError, match="int32"):
        loaded(Mutated(), "A2")


def test_a_write_in_the_default_format_is_noticed() -> None:
    class Mutated(FakeTorchNpu):
        def npu_scatter_pa_kv_cache(self, *, cache_mode: str = "PA_NZ", **call: Any) -> None:
            super().npu_scatter_pa_kv_cache(**call)

    with pytest.raises(ContractError, match="PA_NZ"):
        loaded(Mutated(), "A5")


@pytest.mark.parametrize("mutation", ROTATIONS)
def test_a_wrong_rotation_is_noticed(mutation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Mutated(FakeTorchNpu):
        def npu_rotary_mul(self, input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half") -> Tensor:
            call = {"input": input, "r1": r1, "r2": r2, "rotary_mode": rotary_mode}
            return super().npu_rotary_mul(**ROTATIONS[mutation](call))

    monkeypatch.setitem(sys.modules, "torch_npu", Mutated())
    with pytest.raises(ContractError):
        loaded(Mutated(), "A2")


@pytest.mark.parametrize("name", ["Stream", "Event", "stream", "current_stream", "synchronize"])
def test_leaving_the_current_stream_is_noticed(name: str) -> None:
    with pytest.raises(ContractError, match=name):
        getattr(torch.npu, name)


def test_cudas_events_are_noticed() -> None:
    with pytest.raises(ContractError, match="does nothing"):
        torch.cuda.Event()


def test_a_skipped_slot_is_not_written(npu: FakeTorchNpu) -> None:
    cache, tokens = torch.zeros(2, 4, 1, 8), torch.ones(2, 1, 8)
    npu._npu_reshape_and_cache(tokens, tokens, cache, cache.clone(), torch.tensor([-1, 5], dtype=torch.int32))
    assert cache.sum(dim=(2, 3)).flatten().tolist() == [0, 0, 0, 0, 0, 8, 0, 0]


def test_interleaved_memory_is_refused(npu: FakeTorchNpu) -> None:
    memory = Memory.poisoned("BNH2D", Shape(4, 16, 2, 32), torch.float32, [frequencies(32)])
    with pytest.raises(UnsupportedKVError, match=r"strides .*\(ND\)"):
        NpuCopier(memory.layers, DEVICE_OPERATORS["A2"](npu).reshape_and_cache)


def test_npus_are_served_by_the_operators(monkeypatch) -> None:
    monkeypatch.setattr(dispatch, "_device", lambda _: SimpleNamespace(type="npu"))  # torch has no such device here
    memory = Memory.poisoned(PAIR, Shape(4, 16, 2, 32), torch.float32, [frequencies(32)])
    copier = dispatch.copier_for(memory.layers, DEVICE_OPERATORS["A2"](FakeTorchNpu()).reshape_and_cache)
    assert copier.name == "torch_npu"
    with pytest.raises(UnsupportedKVError, match="writer is needed"):
        dispatch.copier_for(memory.layers)
