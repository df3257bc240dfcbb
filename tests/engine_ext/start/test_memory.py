# SPDX-License-Identifier: Apache-2.0
"""The pool is part of the memory that vLLM plans for."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app.advice import remedy_for
from engine_ext.core import ascend
from engine_ext.start import memory
from tests.kernels.fake_npu import FakeNpuPlatform

GIB = 1 << 30


def arguments(share: float = 0.9, kv_cache_bytes: int | None = None) -> Any:
    """The arguments for memory alone: a full set would look up a model."""
    return SimpleNamespace(gpu_memory_utilization=share, kv_cache_memory_bytes=kv_cache_bytes)


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimpleNamespace(is_cpu=lambda: False, get_device_total_memory=lambda: 80 * GIB)
    monkeypatch.setattr(memory, "current_platform", device)


@pytest.mark.parametrize(("asked", "pool", "left"), [(8 * GIB, 8 * GIB, 0.8), (None, 0.15 * 72 * GIB, 0.85 * 0.9)])
def test_the_pool_is_taken_from_vllms_share(asked, pool, left):
    """By default, it is a share of what vLLM may take of the device."""
    args = arguments(0.9)
    assert memory.make_room(args, asked) == pytest.approx(pool)
    assert args.gpu_memory_utilization == pytest.approx(left)


def test_a_pool_that_leaves_nothing_is_refused_with_numbers():
    args = arguments(0.5)
    expected = "the chunk pool's 40.0 GiB leave nothing of vLLM's 40.0 GiB (--gpu-memory-utilization 0.5): lower"
    assert expected in str(memory.make_room(args, 40 * GIB))
    assert args.gpu_memory_utilization == 0.5


@pytest.mark.parametrize(("asked", "pool"), [(79 * GIB, 79 * GIB), (None, GIB)])
def test_without_a_share_the_pool_is_as_asked_or_a_gibibyte(asked, pool, monkeypatch):
    """Beside a KV cache of a given size, and on CPUs."""
    args = arguments(0.9, GIB)
    assert memory.make_room(args, asked) == pool
    assert args.gpu_memory_utilization == 0.9
    monkeypatch.setattr(memory.current_platform, "is_cpu", lambda: True)
    assert memory.make_room(arguments(), None) == GIB
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    assert memory.make_room(arguments(), asked) == pool


@pytest.fixture
def torch_npu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The source of torch_npu that other processes import; this one's platform is vLLM-Ascend's."""
    for module in (memory, ascend):
        monkeypatch.setattr(module, "current_platform", FakeNpuPlatform())
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path / "torch_npu.py"


def test_on_npus_another_process_asks_for_the_memory_and_without_an_answer_there_is_no_cache(torch_npu):
    """It has 64 GiB; vLLM-Ascend's platform raises."""
    torch_npu.write_text(f"""
class npu:
    mem_get_info = staticmethod(lambda device=None: ({60 * GIB}, {64 * GIB}))

print("a line of the driver's")
""")
    args = arguments(0.9)
    assert memory.make_room(args, 16 * GIB) == 16 * GIB
    assert args.gpu_memory_utilization == pytest.approx(0.65)
    torch_npu.write_text("raise ImportError('libhccl.so: cannot open shared object file')")
    args = arguments(0.9)
    reason = str(memory.make_room(args, GIB))
    assert reason.endswith("memory is unknown: ImportError: libhccl.so: cannot open shared object file")
    assert "--kv-cache-memory-bytes" in remedy_for(reason)
    assert args.gpu_memory_utilization == 0.9
