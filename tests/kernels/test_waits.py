# SPDX-License-Identifier: Apache-2.0
"""The engine's thread never waits for a device: loads, saves and attention only queue work."""

import ast
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.attention.plan import AttendingRow, Tail, plan_step, runs_of
from kernels.layout import PagedTensor
from kernels.npu_copier import NpuCopier
from kernels.paged import KVCopier, LayerKV, make_pool
from kernels.reference import frequencies
from tests.kernels.attending import BLOCK, PAGE, segment
from tests.kernels.copiers import triton_copier
from tests.kernels.fakes import LAYOUTS, Shape
from tests.support.sources import MODULES, parse

WAITING = {"cpu", "item", "nonzero", "synchronize", "tolist"}
"""Methods that wait for a device whose tensor they are called of."""
ALLOWED = {
    "engine_ext/core/attention/backend.py": ({"tolist"}, "once in steps with attending rows"),
    "engine_ext/core/attention/decoding.py": ({"tolist"}, "on CPUs alone"),
    "engine_ext/core/attention/probes.py": ({"tolist"}, "likewise"),
    "engine_ext/core/attention/rows.py": ({"tolist"}, "the blocks of steps with such rows"),
    "engine_ext/core/lora.py": ({"tolist"}, "on CPUs alone"),
    "engine_ext/core/moves.py": ({"synchronize"}, "waits on purpose, in threads beside the engine's"),
    "engine_ext/core/pages.py": ({"cpu", "tolist"}, "the self-check's comparison; tags, which are NumPy's"),
    "engine_ext/core/prefixes/worker.py": ({"tolist"}, "numbers of blocks, which are NumPy's"),
    "engine_ext/core/rotary.py": ({"cpu"}, "at the start"),
    "kernels/attention/reference.py": ({"tolist"}, "for tests"),
    "kernels/attention/triton_attention.py": ({"tolist"}, "of the plan, which is on the CPU"),
    "kernels/layout.py": ({"cpu", "nonzero", "tolist"}, "at the start"),
    "kernels/reference.py": ({"tolist"}, "for tests"),
    "kernels/rope.py": ({"cpu", "nonzero", "tolist"}, "tables at the start, and deltas, which are on the CPU"),
}


def waits(node: ast.AST) -> str | None:
    """The name of what waits for a device, or takes the current one for a tensor's, if the node calls it."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return None
    name = node.func.attr
    if name == "to" and any(isinstance(each, ast.Constant) and each.value == "cpu" for each in node.args):
        return "cpu"
    is_deviceless = name in ("current_stream", "current_device") and not node.args and not node.keywords
    return name if name in WAITING or is_deviceless else None


def test_what_may_wait_for_a_device_is_known():
    """By name only: whether a tensor is on a device, its reason tells."""
    found: dict[str, set[str]] = {}
    for name in MODULES:
        if name.startswith(("engine_ext/core/", "kernels/")):
            for call in filter(None, map(waits, ast.walk(parse(name)))):
                found.setdefault(name, set()).add(call)
    assert found == {name: names for name, (names, _) in ALLOWED.items()}


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("x.cpu()", "cpu"),
        ("x.to('cpu', torch.float64)", "cpu"),
        ("torch.cuda.synchronize()", "synchronize"),
        ("torch.cuda.current_stream()", "current_stream"),
        ("torch.cuda.current_stream(device)", None),
        ("x.to(device)", None),
    ],
)
def test_what_waits_is_seen(source, name):
    assert waits(ast.parse(source, mode="eval").body) == name


class Kernel:
    """Is launched, and does nothing."""

    def __init__(self) -> None:
        self.num_launches = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*_: Any, **__: Any) -> None:
            self.num_launches += 1

        return launch


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Kernel]]:
    """Kernels in place of Triton's, and a device whose tensors have no numbers to wait for."""
    from kernels import triton_copier
    from kernels.attention import triton_attention

    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor)
    replaced = []
    for module, name in (
        (triton_copier, "move_tokens"),
        (triton_attention, "attend_units"),
        (triton_attention, "merge_units"),
    ):
        replaced.append(Kernel())
        monkeypatch.setattr(module, name, replaced[-1])
    return replaced


def layer_on_a_device(layout: str = "B2NHD") -> LayerKV:
    size, views = LAYOUTS[layout]
    shape = Shape(8, BLOCK, 2, 64)
    blocks = [PagedTensor.of(view) for view in views(torch.empty(size(shape), dtype=torch.bfloat16, device="meta"))]
    return LayerKV(*blocks, *(make_pool(each, 16, PAGE) for each in blocks), frequencies(64))


def test_a_number_of_the_device_can_not_be_had():
    pool = layer_on_a_device().key_pool
    for wait in (bool, int, float, Tensor.item, Tensor.tolist, Tensor.cpu, Tensor.nonzero):
        with pytest.raises((RuntimeError, NotImplementedError)):
            wait(pool[0, 0, 0, 0])


def npu_copier(layers: list[LayerKV]) -> KVCopier:
    return NpuCopier(layers, lambda **_: None)


@pytest.mark.parametrize(("make", "layout"), [(triton_copier, "B2NHD"), (npu_copier, "2BNHD")])
@pytest.mark.parametrize("deltas", [[0, 0, 0], [5, 5, 7], [0, 3, 3]])
def test_copies_are_queued(make, layout, deltas, kernels, monkeypatch):
    rotary = SimpleNamespace(npu_rotary_mul=lambda keys, cos, sin, rotary_mode: keys)
    monkeypatch.setitem(sys.modules, "torch_npu", rotary)
    copier = make([layer_on_a_device(layout) for _ in range(2)])
    slots, rows = torch.tensor([3, 4, 40]), torch.tensor([0, 1, 17])
    copier.save(slots, rows)
    copier.load(slots, rows, torch.tensor(deltas))
    assert kernels[0].num_launches == (2 if make is triton_copier else 0)


def test_attention_is_queued(kernels):
    from kernels.attention.triton_attention import TritonAttention

    shared = segment((1, 2), 3, 29, 11)
    rows = [AttendingRow(each, 1, [shared], Tail(runs_of((each,), BLOCK, 0, 5), 5)) for each in range(4)]
    layer = layer_on_a_device()
    query = torch.empty(4, 8, 64, dtype=torch.bfloat16, device="meta")
    TritonAttention([layer]).attend(0, query, torch.empty_like(query), plan_step(rows), 0.1)
    assert [kernel.num_launches for kernel in kernels] == [0, 1, 1]
