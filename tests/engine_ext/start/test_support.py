# SPDX-License-Identifier: Apache-2.0
"""vLLM flags that turn the chunk cache off, each with its reason."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import KVTransferConfig, ModelConfig, VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs

from app.advice import advice_for, remedy_for
from cache.positions.layout import PositionStrategy
from cache.positions.strategy import UNKNOWN, strategy_for
from engine_ext.core.layers import UnsupportedModelError, attention_layers
from engine_ext.start import support
from engine_ext.start.support import attention_reason, drops_blocks, in_place_reason, turning_reason, unsupported_reason
from tests.kernels.fake_npu import FakeModelFiles
from tests.support.ascend import Layer, Model, Rope


@pytest.fixture(scope="module")
def model(tiny_llama: Path) -> ModelConfig:
    return AsyncEngineArgs(model=str(tiny_llama), dtype="float32").create_model_config()


def reason(model: ModelConfig, **flags: Any) -> str | None:
    return unsupported_reason(AsyncEngineArgs(model=model.model, **flags), model)


DESCRIPTION = "quant_model_description.json"
QUANTIZED: list[tuple[dict[str, str], bool]] = [
    ({"model_quant_type": "W8A8"}, False),
    ({"kv_cache_type": "C8", "model.layers.0.self_attn.k_proj.kv_cache_scale": "C8"}, True),
    ({"fa_quant_type": "FAKQuant", "model.layers.0.self_attn.fa_k.scale": "FAKQuant"}, True),
]


@pytest.fixture
def on_ascend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of `org/quantized`, a model on a hub."""
    names = SimpleNamespace(MODELSLIM_CONFIG_FILENAME=DESCRIPTION)
    monkeypatch.setitem(sys.modules, "vllm_ascend.quantization.modelslim_config", names)
    monkeypatch.setitem(sys.modules, "vllm_ascend.quantization.utils", FakeModelFiles({"org/quantized": tmp_path}))
    monkeypatch.setattr(support, "is_ascend", lambda: True)
    return tmp_path


@pytest.mark.parametrize("told_by", ["the folder", "org/quantized", "org/plain", "its configuration"])
@pytest.mark.parametrize(("description", "is_refused"), QUANTIZED)
def test_what_vllm_ascend_quantizes_is_refused_whoever_tells_of_it(
    told_by, description, is_refused, on_ascend, model, monkeypatch
):
    """A file in the model's folder or on its hub, or the model's own configuration."""
    args = AsyncEngineArgs(model=model.model)
    if told_by == "its configuration":
        monkeypatch.setattr(model.hf_config, "quantization_config", description, raising=False)
    else:
        (on_ascend / DESCRIPTION).write_text(json.dumps(description))
        monkeypatch.setattr(model, "model", str(on_ascend) if told_by == "the folder" else told_by)
    found = unsupported_reason(args, model) or ""
    assert ("quantizes its KV cache (C8)" in found) is (is_refused and told_by != "org/plain")


@pytest.mark.parametrize(
    ("flags", "is_refused"),
    [
        ({}, False),
        ({"pipeline_parallel_size": 2}, True),
        ({"pipeline_parallel_size": 2, "async_scheduling": True}, True),
        ({"pipeline_parallel_size": 2, "async_scheduling": False}, False),
    ],
)
def test_stages_that_vllm_ascend_would_leave_without_tokens_are_refused(flags, is_refused, on_ascend, model):
    found = reason(model, **flags) or ""
    assert ("keeps tokens from the first pipeline stages" in found) is is_refused
    assert not is_refused or remedy_for(found) == "add --no-async-scheduling"


@pytest.mark.parametrize(
    ("window", "flags", "in_place", "drops"),
    [
        (48, {}, False, True),
        (None, {}, False, False),
        (48, {}, True, False),
        (48, {"disable_hybrid_kv_cache_manager": True}, False, False),
        (48, {"kv_offloading_size": 1}, False, False),
    ],
)
def test_blocks_behind_windows_are_dropped_unless_others_read_them(window, flags, in_place, drops, model):
    windowed: Any = SimpleNamespace(get_sliding_window=lambda: window)
    assert drops_blocks(AsyncEngineArgs(model=model.model, **flags), windowed, in_place=in_place) is drops


def connector(name: str, **extra: Any) -> KVTransferConfig:
    return KVTransferConfig(kv_connector=name, kv_role="kv_both", kv_connector_extra_config=extra)


def several(*names: str) -> KVTransferConfig:
    return connector("MultiConnector", connectors=[{"kv_connector": name, "kv_role": "kv_both"} for name in names])


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"kv_cache_dtype": "bfloat16"},
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"enable_lora": True},
        {"enable_prefix_caching": False},
        {"scheduling_policy": "priority"},
        {"kv_cache_dtype": "fp8"},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
        {"kv_offloading_size": 1},
        {"kv_transfer_config": connector("NixlConnector")},
        {"kv_transfer_config": several("NixlConnector", "OffloadingConnector")},
    ],
)
def test_supported(model, flags):
    assert reason(model, **flags) is None


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"kv_cache_dtype": "fp8_e5m2"}, "--kv-cache-dtype=fp8_e5m2: chunks can be reused in fp8_e4m3"),
        ({"decode_context_parallel_size": 2}, "context parallelism"),
        ({"prefill_context_parallel_size": 2}, "context parallelism"),
        (
            {"kv_transfer_config": connector("ExampleConnector")},
            "--kv-transfer-config: ExampleConnector: it finds KV by token ids",
        ),
        ({"kv_transfer_config": connector("LMCacheMPConnector")}, "LMCacheMPConnector: it finds KV by token ids"),
        ({"kv_offloading_size": 1, "kv_offloading_backend": "lmcache"}, "--kv-offloading-size: LMCacheMPConnector: it"),
        ({"kv_transfer_config": connector("FlexKVConnectorV1")}, "FlexKVConnectorV1: not known to find KV by request"),
        (
            {"kv_transfer_config": several("OffloadingConnector", "ExampleConnector")},
            "--kv-transfer-config: ExampleConnector: it finds KV by token ids",
        ),
        ({"kv_transfer_config": several()}, "it names no connector"),
    ],
)
def test_refused(model, flags, words):
    """With the reason, and with advice."""
    given = reason(model, **flags) or ""
    assert words in given
    assert advice_for(given)


def test_an_allocator_that_vllm_refuses_beside_connectors(model, monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64,expandable_segments:True")
    assert "has expandable_segments:True" in (reason(model) or "")
    assert reason(model, enable_sleep_mode=True) is None
    args = AsyncEngineArgs(model=model.model, kv_transfer_config=connector("NixlConnector"))
    with pytest.raises(ValueError, match="expandable_segments"):  # what it would come to
        args.create_engine_config()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint8])
def test_a_quantized_cache_that_a_checkpoint_asks_for(dtype):
    model = Model(Rope(64, True), Layer(num_kv_heads=2, head_size=64))
    kv_caches = {"model.layers.0.attn": torch.zeros(4, 2, 32, 128, dtype=dtype)}
    with pytest.raises(UnsupportedModelError, match="quantized KV cache"):
        attention_layers(model, {"model.layers.0.attn": model.attn}, kv_caches)


@pytest.fixture
def config(model: ModelConfig) -> VllmConfig:
    return AsyncEngineArgs(model=model.model, dtype="float32", enforce_eager=True).create_engine_config()


@pytest.mark.parametrize(
    ("part", "field", "value", "in_place", "attending"),
    [
        ("cache_config", "enable_prefix_caching", True, "None", "None"),
        ("cache_config", "enable_prefix_caching", False, "prefix cache", "None"),
        ("model_config", "disable_cascade_attn", False, "cascade attention", "cascade attention"),
        ("cache_config", "cache_dtype", "fp8", "None", "quantized KV cache"),
        ("parallel_config", "enable_dbo", True, "None", "--enable-dbo"),
        ("parallel_config", "ubatch_size", 2, "None", "--ubatch-size"),
        ("model_config", "is_mm_prefix_lm", True, "None", "tokens of an image"),
    ],
)
def test_why_blocks_are_not_shared_in_place_or_attended_to(
    part, field, value, in_place, attending, config, monkeypatch
):
    monkeypatch.setattr(getattr(config, part), field, value)
    assert in_place in str(in_place_reason(config))
    assert attending in str(attention_reason(config))


@pytest.mark.parametrize(
    ("dtype", "strategy", "is_refused"),
    [
        ("fp8", UNKNOWN, True),
        ("fp8_e4m3", UNKNOWN, True),
        ("auto", UNKNOWN, False),
        ("fp8", strategy_for(["parallel"]), False),
        ("fp8", strategy_for(["offset"]), False),
        ("fp8", replace(UNKNOWN, strategy=PositionStrategy.PARALLEL), False),
    ],
)
def test_keys_of_a_quantized_cache_turn_only_where_that_was_chosen(dtype, strategy, is_refused):
    assert ("rounds them once more" in str(turning_reason(dtype, strategy))) == is_refused


@pytest.mark.parametrize(("method", "words"), [("ngram", "None"), ("draft_model", "drafts tokens")])
def test_a_model_that_drafts_tokens_does_not_attend(model, method, words):
    drafts = {"method": method, "num_speculative_tokens": 2, **({"model": model.model} if method != "ngram" else {})}
    arguments = AsyncEngineArgs(model=model.model, dtype="float32", speculative_config=drafts)
    assert words in str(attention_reason(arguments.create_engine_config()))


@pytest.mark.parametrize(
    ("others", "words"), [(["OffloadingConnector"], "None"), (["NixlConnector"], "lack the chunks")]
)
def test_connectors_that_pass_on_blocks_keep_requests_from_attending(others, words, config, monkeypatch):
    monkeypatch.setattr(config, "kv_transfer_config", several("ChunkCacheConnector", *others))
    assert words in str(attention_reason(config))
