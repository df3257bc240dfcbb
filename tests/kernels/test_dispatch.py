# SPDX-License-Identifier: Apache-2.0
"""Each device gets its copier; unsupported layers are refused with a reason."""

import logging
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels import dispatch, numba_copier
from kernels.attention.amx_attention import AmxAttention
from kernels.attention.numba_attention import NumbaAttention
from kernels.dispatch import attention_for, copier_for
from kernels.layout import PagedTensor
from kernels.paged import LayerKV, UnsupportedKVError
from kernels.reference import frequencies
from tests.kernels.fakes import AMX, Shape
from tests.kernels.spans import Memory


def layers(layout: str = "cpu", dtype: torch.dtype = torch.float32) -> tuple[LayerKV, ...]:
    return Memory.poisoned(layout, Shape(3, 32, 2, 32), dtype, [frequencies(32)] * 2).layers


def elsewhere(dtype: torch.dtype = torch.float32) -> list[LayerKV]:
    """A layer on an unsupported device."""
    view = torch.empty(2, 16, 2, 32, device="meta", dtype=dtype)
    blocks = PagedTensor.of(view)
    return [LayerKV(blocks, blocks, view, view, frequencies(32))]


@pytest.mark.parametrize(("layout", "dtype"), [("cpu", torch.float32), ("cpu", torch.bfloat16), (AMX, torch.bfloat16)])
def test_vllms_layouts_on_cpus_are_copied_by_compiled_code(layout, dtype, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "kernels"):
        assert copier_for(layers(layout, dtype)).name == "numba"
    assert "moved by numba on cpu" in caplog.text


@pytest.mark.parametrize(
    ("layout", "dtype"), [("cpu", torch.float16), ("cpu", torch.float8_e4m3fn), ("2BNHD", torch.float32)]
)
def test_other_memory_of_a_cpu_is_copied_by_torch_with_a_warning(layout, dtype, caplog) -> None:
    assert copier_for(layers(layout, dtype)).name == "torch"
    assert "times faster" in caplog.text
    assert str(dtype).removeprefix("torch.") in caplog.text


def test_with_many_threads_torch_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba_copier, "MOST_TORCH_THREADS", 0)
    assert copier_for(layers()).name == "torch"


def changed(**fields: Any) -> list[LayerKV]:
    return [replace(layers()[0], **fields)]


DTYPES_ARE = "supported: one of bfloat16, float16, float32, float8_e4m3fn"


@pytest.mark.parametrize(
    ("refused", "why"),
    [
        (elsewhere(), "on meta; supported: cpu, cuda, npu"),
        (elsewhere(torch.int8), f"are int8; {DTYPES_ARE}"),
        (elsewhere(torch.float8_e5m2), f"are float8_e5m2; {DTYPES_ARE}"),
        (changed(key_pool=layers()[0].key_pool.bfloat16()), f"are bfloat16, float32; {DTYPES_ARE}"),
        ([*layers(), *elsewhere()], r"one device, not on \['cpu', 'meta'\]"),
        (changed(frequencies=frequencies(64)), "64 dims of K's head size 32"),
        (changed(value_pool=layers()[0].value_pool[:, :, :1]), "differ in heads or head size"),
    ],
    ids=["device", "int8", "e5m2", "two dtypes", "two devices", "a wide rotation", "a pool of another shape"],
)
def test_what_no_copier_moves_is_refused(refused: list[LayerKV], why: str) -> None:
    with pytest.raises(UnsupportedKVError, match=why):
        copier_for(refused)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_device", lambda _: torch.device("cuda:0"))


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_triton_turns_fp8_on_newer_gpus_only(capability, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    if capability > (8, 9):
        assert dispatch._triton_copier(layers("2BNHD", torch.float8_e4m3fn)).name == "Triton"
    else:
        with pytest.raises(UnsupportedKVError, match=r"float8_e4m3fn on GPUs of compute capability 8\.9"):
            dispatch._triton_copier(layers("2BNHD", torch.float8_e4m3fn))


def test_without_triton_or_with_what_it_does_not_move_a_gpu_is_refused(
    on_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UnsupportedKVError, match="K has tiles of 16 tokens and 2 dimensions"):
        copier_for(layers(AMX, torch.bfloat16))
    wide = Memory.poisoned("BNH2D", Shape(2, 1, 1, 2048), torch.float32, [frequencies(32)])
    with pytest.raises(UnsupportedKVError, match=r"\(2048, 2048\).*up to 1024"):
        copier_for(wide.layers)
    monkeypatch.setitem(sys.modules, "kernels.triton_copier", None)
    with pytest.raises(UnsupportedKVError, match="Triton is needed"):
        copier_for(layers())


def test_cpus_attend_by_numba_and_gpus_by_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(attention_for(layers())) is NumbaAttention
    assert type(attention_for(layers(AMX, torch.bfloat16))) is AmxAttention
    with pytest.raises(UnsupportedKVError, match=r"needs float32 or bfloat16 in vLLM's CPU layouts.*it is float16"):
        attention_for(layers(dtype=torch.float16))
    monkeypatch.setattr(dispatch, "_device", lambda _: torch.device("cuda:0"))
    assert attention_for(layers("2BNHD", torch.float16)).name == "Triton"
    with pytest.raises(UnsupportedKVError, match=r"needs float32, float16 or bfloat16.*it is float8_e4m3fn on cuda:0"):
        attention_for(layers("2BNHD", torch.float8_e4m3fn))
