# SPDX-License-Identifier: Apache-2.0
"""The worker extension: its reasons against the cache, and one of the user's beside it."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, FullAttentionSpec

from app.advice import OTHERWISE, remedy_for
from engine_ext.core import ascend, worker_extension
from engine_ext.core.layers import UnsupportedModelError
from engine_ext.core.worker import PoolDescription, PoolSizeError, WorkerHalf
from engine_ext.core.worker_extension import ChunkCacheWorkerExtension
from engine_ext.start.startup import ChunkCacheOptions, beside
from kernels.layout import LayoutProbeError
from kernels.paged import PoolMemory, UnsupportedKVError
from tests.kernels.fake_npu import FakeMLAAttentionSpec, FakeNpuPlatform, get_memory_info

OURS = ChunkCacheOptions().worker_extension_class


@pytest.mark.parametrize(("path", "message"), [("no.Class", "No module named 'no'"), (f"{__name__}.No", "'No'")])
def test_a_class_that_is_not_there_is_named(path, message):
    with pytest.raises((ImportError, AttributeError), match=message):
        resolve_obj_by_qualname(beside(OURS, path))


FULL = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=64, dtype=torch.float32)
LOCAL = ChunkedLocalAttentionSpec(
    block_size=32, num_kv_heads=2, head_size=64, dtype=torch.float32, attention_chunk_size=64
)


def prepared(outcome: Any, monkeypatch: pytest.MonkeyPatch, spec: Any = FULL, half: WorkerHalf | None = None) -> Any:
    """The answer to the app when preparing the pool ends in ``outcome``."""

    class Extension(ChunkCacheWorkerExtension):
        def _prepare(self, half: WorkerHalf) -> PoolDescription:
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

    group = SimpleNamespace(kv_cache_spec=spec, layer_names=["layer"])
    connector = SimpleNamespace(kv_cache_groups=[group], worker=half or WorkerHalf(1 << 20, 32, 32))
    monkeypatch.setattr(worker_extension, "chunk_connector", lambda: connector)
    return Extension().chunk_cache_prepare()


@pytest.mark.parametrize(
    ("error", "reason", "remedy"),
    [
        (
            LayoutProbeError("K is not what was written", "9 of 16 elements differ", "use another backend"),
            "vLLM keeps keys and values in a layout that Tessera can't read: K is not what was written; seen: 9 of",
            "another --attention-backend; on a CPU --dtype float32",
        ),
        (UnsupportedModelError("layer 0 uses ALiBi"), "layer 0 uses ALiBi", OTHERWISE),
        (UnsupportedKVError("on cuda Triton is needed: no module"), "on cuda Triton", "pip install triton"),
        (
            PoolSizeError("7 bytes hold no page of 32 tokens"),
            "7 bytes hold",
            "the pool more, e.g. --chunk-cache-memory",
        ),
        (KeyError("rope"), "KeyError: 'rope'", "please report it"),
    ],
)
def test_why_the_pool_was_not_prepared(error, reason, remedy, monkeypatch):
    told = prepared(error, monkeypatch)["reason"]
    assert told.startswith(reason)
    assert remedy in remedy_for(told)


def test_a_pool_that_was_not_prepared_gives_its_memory_back(monkeypatch):
    half = WorkerHalf(1 << 20, 32, 32)
    half._memory = PoolMemory(half.pool_bytes, 2, torch.device("meta"))
    prepared(LayoutProbeError("K", "9", "another"), monkeypatch, half=half)
    with pytest.raises(PoolSizeError):
        half.check_room(0)


def test_layers_with_other_data_and_dropped_blocks_are_refused(monkeypatch):
    told = prepared(AssertionError("not reached"), monkeypatch, LOCAL)
    assert told == {"reason": "KV of some layers can't be read from vLLM's blocks (ChunkedLocalAttentionSpec)"}
    monkeypatch.setattr(worker_extension, "IS_ASCENDS", True)
    half = WorkerHalf(1 << 20, 32, 32, tables=[SimpleNamespace()])  # type: ignore[list-item]
    told = prepared(AssertionError("not reached"), monkeypatch, half=half)["reason"]
    assert told.startswith("layers with windows drop blocks")
    assert remedy_for(told) == OTHERWISE


@pytest.mark.parametrize(
    ("fields", "is_read"), [({}, True), ({"sparse_head_dim": (512, 64, 128)}, False), ({"compress_ratio": 4}, False)]
)
def test_on_npus_latent_attention_has_a_kind_of_its_own(fields, is_read, monkeypatch):
    kinds = SimpleNamespace(AscendMLAAttentionSpec=FakeMLAAttentionSpec)
    monkeypatch.setitem(sys.modules, "vllm_ascend.core.kv_cache_interface", kinds)
    monkeypatch.setattr(ascend, "current_platform", FakeNpuPlatform())
    spec = FakeMLAAttentionSpec(block_size=128, num_kv_heads=1, head_size=576, dtype=torch.bfloat16, **fields)
    told = prepared(UnsupportedModelError("reached"), monkeypatch, spec)["reason"]
    assert (told == "reached") is is_read


@pytest.mark.parametrize("is_ascend", [False, True])
def test_a_pool_larger_than_the_free_memory_is_refused(is_ascend, monkeypatch):
    """On NPUs, torch_npu tells what is free."""
    if is_ascend:
        npu = SimpleNamespace(mem_get_info=lambda device=None: (1 << 20, 1 << 30))
        monkeypatch.setitem(sys.modules, "torch_npu", SimpleNamespace(npu=npu))
        monkeypatch.setattr(ascend, "current_platform", FakeNpuPlatform())
    info = get_memory_info if is_ascend else lambda: (1 << 20, 1 << 30)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", info)
    with pytest.raises(PoolSizeError, match="2 MiB are more than the 1 MiB that are free") as raised:
        ChunkCacheWorkerExtension()._prepare(WorkerHalf(2 << 20, 32, 32))
    assert "a smaller --chunk-cache-memory" in remedy_for(str(raised.value))


@pytest.mark.parametrize(
    "runner",
    [
        SimpleNamespace(
            requests={"a": SimpleNamespace(num_prompt_tokens=5), "b": SimpleNamespace(num_prompt_tokens=7)}
        ),
        SimpleNamespace(
            req_states=SimpleNamespace(
                prompt_len=SimpleNamespace(np=torch.tensor([0, 5, 7]).numpy()), req_id_to_index={"a": 1, "b": 2}
            )
        ),
    ],
    ids=["V1", "V2"],
)
def test_the_lengths_of_prompts_are_known_to_either_model_runner(runner):
    extension = ChunkCacheWorkerExtension()
    extension.model_runner = runner
    assert extension._prompts(["b", "a"]) == [7, 5]
