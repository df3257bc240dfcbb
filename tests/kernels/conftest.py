# SPDX-License-Identifier: Apache-2.0
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch


@pytest.fixture(autouse=True, scope="package")
def triton_interpreted() -> Iterator[None]:
    """Set for these tests only; Triton reads it when a kernel is defined and when it runs."""
    with pytest.MonkeyPatch.context() as patches:
        patches.setenv("TRITON_INTERPRET", "1")
        interpret_triton_itself(patches)
        yield


def interpret_triton_itself(patches: pytest.MonkeyPatch) -> None:
    """Has Triton's own functions (sums, maxima) interpreted, too, where it was imported before the variable was set."""
    import triton.language as tl
    from triton.language import standard
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    for module in (tl, standard):
        for name, function in list(vars(module).items()):
            if isinstance(function, JITFunction):
                patches.setattr(module, name, InterpretedFunction(function.fn))


@pytest.fixture
def bfloat16_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has Triton's interpreter multiply bfloat16; it takes their bits for integers."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, _convert_float

    product = InterpreterBuilder.create_dot

    def widened(operand: Any) -> Any:
        if operand.dtype.scalar != tl.bfloat16:
            return operand
        data = _convert_float(operand.data, tl.bfloat16, tl.float32, None)
        return TensorHandle(data.view("float32"), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
        return product(self, widened(a), widened(b), *others)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


@pytest.fixture
def npu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake operators, with streams and events that must not be used."""
    from tests.kernels.fake_npu import FakeCudaEvent, FakeStreams, FakeTorchNpu  # imports vLLM

    monkeypatch.setitem(sys.modules, "torch_npu", FakeTorchNpu())
    monkeypatch.setattr(torch, "npu", FakeStreams(), raising=False)
    monkeypatch.setattr(torch.cuda, "Event", FakeCudaEvent)
