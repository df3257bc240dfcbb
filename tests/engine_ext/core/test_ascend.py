# SPDX-License-Identifier: Apache-2.0
"""vLLM-Ascend's caches, writers, allocator and refusals, with fakes of its modules."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine_ext.core import ascend, worker_extension
from engine_ext.core.layers import AttentionLayer, UnsupportedModelError, attention_layers
from engine_ext.core.worker import WorkerHalf
from engine_ext.core.worker_extension import ChunkCacheWorkerExtension
from kernels import dispatch
from tests.kernels.fake_npu import DEVICE_OPERATORS, FakeCaMemAllocator, FakeNpuPlatform, FakeTorchNpu, get_memory_info
from tests.support.ascend import Layer, Model, Rope

BLOCKS, BLOCK = 4, 128


@pytest.fixture(params=DEVICE_OPERATORS)
def on_ascend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Fakes of vLLM-Ascend's modules; the dictionary sets their answers."""
    said = {"is_310p": False, "enable_kv_nz": False, "allocator": FakeCaMemAllocator()}
    npu: Any = FakeTorchNpu()
    npu.npu = SimpleNamespace(mem_get_info=lambda device=None: (1 << 24, 1 << 30))
    modules = {
        "torch_npu": npu,
        "vllm_ascend.device.device_op": SimpleNamespace(DeviceOperator=DEVICE_OPERATORS[request.param](npu)),
        "vllm_ascend.ascend_config": SimpleNamespace(
            get_ascend_config=lambda: SimpleNamespace(enable_kv_nz=said["enable_kv_nz"])
        ),
        "vllm_ascend.utils": SimpleNamespace(is_310p=lambda: said["is_310p"]),
        "vllm_ascend.device_allocator.camem": SimpleNamespace(CaMemAllocator=said["allocator"]),
    }
    for name in ("vllm_ascend", "vllm_ascend.device", "vllm_ascend.device_allocator"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", get_memory_info)
    for module in (ascend, worker_extension):
        monkeypatch.setattr(module, "current_platform", FakeNpuPlatform())
    return said


def config(has_sleep_mode: bool = True, **model: Any) -> Any:
    fields = {"hf_text_config": SimpleNamespace(**model), "enable_sleep_mode": has_sleep_mode}
    return SimpleNamespace(model_config=SimpleNamespace(**fields))


def caches(*widths: int, heads: int = 2, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    return tuple(torch.zeros(BLOCKS, BLOCK, heads, width, dtype=dtype) for width in widths)


def only_layer(kv_caches: tuple[Tensor, ...], rope: Rope | None = None, **fields: Any) -> AttentionLayer:
    """The only attention layer of a model, as it is found."""
    model = Model(rope or Rope(64, True), Layer(**(fields or {"num_kv_heads": 2, "head_size": 64})))
    [layer] = attention_layers(model, {"model.layers.0.attn": model.attn}, {"model.layers.0.attn": kv_caches})
    return layer


def test_a_pair_of_caches_is_probed_and_written_by_the_engines_writer(on_ascend):
    pair = caches(64, 64)
    layer = only_layer(pair)
    assert (layer.cache.key_cache, layer.cache.value_cache) == pair
    half = WorkerHalf(1 << 20, 32, BLOCK)
    layout = half.probe(layer)
    assert layout.key_view(pair[0]).strided.stride() == pair[0].stride()
    assert layout.value_view(pair[1]).tiles.data_ptr() == pair[1].data_ptr()
    assert half.prepare([layer], ascend.reshape_and_cache()).page_bytes == 32 * 2 * 128 * 4


def test_of_latent_attention_only_the_second_cache_turns_and_by_halves(on_ascend):
    latent, rope = caches(512, 64, heads=1)
    layer = only_layer((latent, rope), Rope(64, False), kv_lora_rank=512, qk_rope_head_dim=64)
    assert layer.cache.key_cache is rope
    assert layer.cache.value_cache is latent
    assert (layer.cache.num_kv_heads, layer.cache.key_size, layer.cache.value_size) == (1, 64, 512)
    assert layer.frequencies.is_neox
    layout = WorkerHalf(1 << 20, 32, BLOCK).probe(layer)
    assert layout.key_view(rope).shape == (BLOCKS, BLOCK, 1, 64)
    assert layout.value_view(latent).shape == (BLOCKS, BLOCK, 1, 512)


@pytest.mark.parametrize(
    ("kv_caches", "reason"),
    [(caches(64, 64, 64), "not one tensor, or two"), (caches(64, 64, dtype=torch.int8), "quantized")],
)
def test_other_caches_are_refused(on_ascend, kv_caches, reason):
    """Caches of sparse attention (a third tensor) and of C8 (int8)."""
    with pytest.raises(UnsupportedModelError, match=reason):
        only_layer(kv_caches)


def test_elsewhere_a_pair_of_caches_is_refused():
    with pytest.raises(UnsupportedModelError, match="not one tensor, or two"):
        only_layer(caches(64, 64))


def test_slots_are_converted_for_the_writer(on_ascend):
    pair, tokens = caches(8, 8, heads=1), torch.ones(2, 1, 8)
    ascend.write_tokens(*pair, tokens, tokens, torch.tensor([3, 200]))
    assert pair[0].sum(dim=(2, 3)).nonzero().tolist() == [[0, 3], [1, 72]]


@pytest.mark.parametrize(
    ("said", "model", "reason"),
    [
        ({"is_310p": True}, {}, "310P"),
        ({"enable_kv_nz": True}, {}, "enable_kv_nz"),
        ({}, {"index_topk": 2048}, "DSA"),
        ({}, {}, None),
    ],
)
def test_what_cannot_be_read_token_by_token_is_refused_with_its_reason(on_ascend, said, model, reason):
    on_ascend.update(said)
    found = ascend.unsupported_reason(config(**model))
    assert (found is None) if reason is None else reason in found


def test_the_pools_memory_carries_vllms_tag_and_leaves_the_kv_caches_pool_in_place(on_ascend):
    allocator = on_ascend["allocator"]
    with allocator.use_memory_pool(tag="kv_cache"):  # as vLLM-Ascend's worker does
        allocator.python_malloc_callback((0, 1, 2, 3))
    kv_cache = allocator.allocator_and_pools["kv_cache"]
    with ascend.pool_memory(config()):
        allocator.python_malloc_callback((0, 1, 3, 4))
    assert allocator.allocator_and_pools["kv_cache"] is kv_cache
    tags = [data.tag for data in allocator.pointer_to_data.values()]
    assert tags == ["kv_cache", "kv_cache"]  # which wake_up(tags=["kv_cache"]) maps again
    assert allocator.current_tag == "default"


@pytest.mark.parametrize("has_sleep_mode", [False, True])
def test_a_worker_prepares_its_pool(has_sleep_mode, on_ascend, monkeypatch):
    """From the free memory to the pool, with what vLLM-Ascend and torch_npu have and no more."""
    monkeypatch.setattr(dispatch, "_device", lambda _: SimpleNamespace(type="npu"))  # torch has no such device here
    model = Model(Rope(64, True), Layer(num_kv_heads=2, head_size=64))

    class Extension(ChunkCacheWorkerExtension):
        model_runner = SimpleNamespace(get_model=lambda: model)
        vllm_config = config(has_sleep_mode)

    modules = {"model.layers.0.attn": model.attn}
    Extension.vllm_config.compilation_config = SimpleNamespace(static_forward_context=modules)
    half = WorkerHalf(1 << 20, 32, BLOCK)
    half.register_kv_caches({"model.layers.0.attn": caches(64, 64)})
    description = Extension()._prepare(half)
    assert (description.num_pages, description.page_bytes) == (32, 32 * 2 * 128 * 4)
    assert half.copier.name == "torch_npu"
    assert list(on_ascend["allocator"].allocator_and_pools) == (["chunk_cache"] if has_sleep_mode else [])
