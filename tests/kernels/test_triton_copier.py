# SPDX-License-Identifier: Apache-2.0
"""Launches of the Triton copier; `test_copiers.py` tests their effect."""

from types import SimpleNamespace

import pytest
import torch

from kernels.paged import LayerKV
from kernels.reference import frequencies
from kernels.rope import RotaryFrequencies
from tests.kernels.copiers import triton_copier
from tests.kernels.fakes import Shape
from tests.kernels.spans import Memory

SHAPE = Shape(4, 16, 2, 32)


def layers(*rotations: RotaryFrequencies, layout: str = "BHN2D") -> tuple[LayerKV, ...]:
    return Memory.poisoned(layout, SHAPE, torch.bfloat16, rotations).layers


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    """Records launches of the kernel instead of running it."""
    from kernels import triton_copier

    seen: list[dict] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]):
            return lambda *args, **constants: seen.append({"grid": grid, "args": args, **constants})

    monkeypatch.setattr(triton_copier, "move_tokens", Kernel())
    return seen


def test_k_and_v_of_all_layers_move_in_one_launch(launches) -> None:
    copier = triton_copier(layers(frequencies(32), frequencies(32, 5e5), frequencies(32, 1e6)))
    copier.load(torch.arange(20), torch.arange(20), torch.full((20,), 4))
    (launch,) = launches
    assert launch["PAIRS"] == 16
    assert launch["tables"].tolist() == [0, 1, 2, -1, -1, -1]
    assert [len(launch["args"][2]), len(launch["args"][3])] == [6, 6]
    copier.save(torch.arange(20), torch.arange(20))
    assert [launch["PAIRS"] for launch in launches[1:]] == [0]


@pytest.mark.parametrize("tokens", [1, 2, 7])
def test_indices_begin_at_multiples_of_16_bytes(launches, tokens) -> None:
    """Otherwise Triton would recompile the kernel for odd numbers of tokens."""
    copier = triton_copier(layers(frequencies(32)))
    copier.load(torch.arange(tokens), torch.arange(tokens), torch.full((tokens,), 4))
    for launch in launches:
        source, target = launch["args"][4:6]
        first = min(source.data_ptr(), target.data_ptr())
        assert (source.data_ptr() - first) % 16 == (target.data_ptr() - first) % 16 == 0


def test_on_ascend_there_is_a_program_for_each_vector_core(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    from kernels.triton_copier import _most_programs

    utils = SimpleNamespace(get_device_properties=lambda index: {"num_vectorcore": 40 + index})
    monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=SimpleNamespace(utils=utils)))
    assert _most_programs(SimpleNamespace(type="npu", index=None)) == 40
    assert _most_programs(SimpleNamespace(type="npu", index=3)) == 43
    assert _most_programs(torch.device("cuda:0")) == 65535
