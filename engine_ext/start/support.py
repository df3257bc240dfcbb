# SPDX-License-Identifier: Apache-2.0
"""Models and flags without support, which are served with the cache off."""

import argparse
import os
from typing import Any, Final

from vllm.config import ModelConfig, VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform

from cache.positions.layout import PositionStrategy
from cache.positions.strategy import DefaultStrategy
from engine_ext.core.ascend import is_ascend, quantizes_kv
from engine_ext.core.layers import QUANTIZED
from engine_ext.start.connectors import other_connectors, others_reason, pass_on_blocks
from kernels.dispatch import fp8_reason

_ALLOCATOR: Final = "PYTORCH_CUDA_ALLOC_CONF"


class UnsupportedFlagError(ValueError):
    """A vLLM flag that Tessera does not support; the message has the alternative."""


def check_flags(args: argparse.Namespace) -> None:
    """Raises :class:`UnsupportedFlagError` for flags that would split one engine's pool over processes."""
    if (count := args.api_server_count or 1) > 1:
        raise UnsupportedFlagError(
            f"--api-server-count={count}: one app process owns one engine's chunk cache; run several replicas instead"
        )
    is_one_rank = args.data_parallel_external_lb or args.data_parallel_rank is not None
    if (size := args.data_parallel_size or 1) > 1 and not is_one_rank:
        raise UnsupportedFlagError(
            f"--data-parallel-size={size}: one app process owns one engine's chunk cache; start each rank by itself, "
            "with --data-parallel-rank, and balance the load outside"
        )
    for name in ("headless", "grpc"):
        if getattr(args, name, False):
            raise UnsupportedFlagError(f"--{name}: Tessera serves HTTP from the process that owns the engine")


def unsupported_reason(engine_args: AsyncEngineArgs, model: ModelConfig, *, in_place: bool = False) -> str | None:
    """The reason why chunks of this model can't be re-positioned exactly, if any."""
    if reason := _flag_reason(engine_args, model) or _model_reason(model):
        return reason
    return None if drops_blocks(engine_args, model, in_place=in_place) else _keeping_reason(model)


def drops_blocks(args: AsyncEngineArgs, model: ModelConfig, *, in_place: bool) -> bool:
    """Whether vLLM may drop blocks behind attention windows; not if others read a request's blocks.

    That takes vLLM's hybrid KV cache manager, which keeps a table of blocks for each kind of layer.
    """
    is_possible = not is_ascend() and not in_place and not other_connectors(args)
    return is_possible and not args.disable_hybrid_kv_cache_manager and bool(model.get_sliding_window())


def is_quantized(config: VllmConfig) -> bool:
    """Whether the KV cache is in fp8."""
    return config.cache_config.cache_dtype in QUANTIZED


def kv_dtype_reason(cache_dtype: str, model: ModelConfig) -> str | None:
    """The reason why chunks can't be reused where vLLM keeps K and V in this dtype, if any."""
    if cache_dtype not in ("auto", "float32", "float16", "bfloat16", *QUANTIZED):
        return "chunks can be reused in fp8_e4m3, not in this type"
    if cache_dtype not in QUANTIZED:
        return None
    checks: list[tuple[Any, str]] = [
        (is_ascend(), "chunks can't be reused in fp8 on Ascend NPUs, where K and V are tensors of their own"),
        (model.use_mla, "chunks can't be reused in fp8 with latent attention (MLA)"),
    ]
    if reason := _first(checks):
        return reason
    capability = current_platform.get_device_capability()
    return None if capability is None else fp8_reason(capability)


def turning_reason(cache_dtype: str, strategy: DefaultStrategy) -> str | None:
    """The reason against turning keys of an fp8 cache to default positions, if any."""
    if strategy.is_known or strategy.strategy is PositionStrategy.PARALLEL or cache_dtype not in QUANTIZED:
        return None
    return (
        f"the KV cache is in {cache_dtype}: {strategy.strategy} positions turn keys, which rounds them once more; "
        f"choose --chunk-mode {strategy.strategy}, or parallel, which turns none"
    )


def in_place_reason(config: VllmConfig) -> str | None:
    """The reason why requests with chunks can't share the engine's blocks, if any."""
    checks: list[tuple[Any, str]] = [
        (not config.cache_config.enable_prefix_caching, "vLLM's prefix cache, which shares them, is off"),
        # It counts references to blocks, and assumes that blocks of all requests are their common beginning.
        (not config.model_config.disable_cascade_attn, "cascade attention needs blocks in the same order"),
    ]
    return _first(checks)


DRAFTS_BY_TEXT = ("ngram", "suffix")
"""Methods of speculative decoding without a model."""


def attention_reason(config: VllmConfig, *, on_gpus: bool = False) -> str | None:
    """The engine's reason why attention layers can't read more, or less, than requests' blocks, if any.

    ``on_gpus``: NVIDIA GPUs will do, where it was never run: the start checks it there.
    """
    drafts, others = config.speculative_config, pass_on_blocks(config.kv_transfer_config)
    checks: list[tuple[Any, str]] = [
        (not (current_platform.is_cpu() or (on_gpus and current_platform.is_cuda())), "proven on CPUs only"),
        (is_quantized(config), "its kernels read no quantized KV cache"),
        (
            drafts is not None and drafts.method not in DRAFTS_BY_TEXT,
            "a model that drafts tokens has layers of its own",
        ),
        (config.parallel_config.use_ubatching, "--enable-dbo or --ubatch-size splits a step's tokens"),
        # Not in every version. Metadata of these is by the numbers of a step's rows, of which vLLM gets a part.
        (getattr(config.model_config, "is_mm_prefix_lm", False), "tokens of an image see later ones"),
        (getattr(config.model_config, "rswa_window", None), "tokens see a window of the answer"),
        (not config.model_config.disable_cascade_attn, "cascade attention counts references to blocks"),
        (others, f"{', '.join(others)} would pass on blocks that lack the chunks"),
    ]
    return _first(checks)


def _first(checks: list[tuple[Any, str]]) -> str | None:
    """The reason of the first check that holds."""
    return next((reason for holds, reason in checks if holds), None)


def _flag_reason(args: AsyncEngineArgs, model: ModelConfig) -> str | None:
    if reason := others_reason(args):
        return reason
    if reason := kv_dtype_reason(args.kv_cache_dtype, model):
        return f"--kv-cache-dtype={args.kv_cache_dtype}: {reason}"
    if "expandable_segments:True" in os.environ.get(_ALLOCATOR, "") and not args.enable_sleep_mode:
        return (
            f"{_ALLOCATOR} has expandable_segments:True, beside which vLLM starts no KV connector: remove it, or add "
            "--enable-sleep-mode"
        )
    if args.decode_context_parallel_size > 1 or args.prefill_context_parallel_size > 1:
        return "context parallelism spreads a sequence's KV over workers"
    if is_ascend() and args.pipeline_parallel_size > 1 and args.async_scheduling is not False:
        # It takes a connector of both roles for one that only computes prompts.
        return (
            "beside a KV connector, vLLM-Ascend's asynchronous scheduling keeps tokens from the first pipeline stages"
        )
    return None


def _shares_kv_of_two_sizes(config: Any) -> bool:
    """Whether some layers share KV and others have heads of another size (Gemma 4)."""
    layers = getattr(config, "per_layer_config", None) or ()
    return bool(getattr(config, "num_kv_shared_layers", 0)) and len({layer.head_dim for layer in layers}) > 1


def _model_reason(model: ModelConfig) -> str | None:
    checks: list[tuple[Any, str]] = [
        (model.runner_type != "generate", f"the model does not generate text (runner {model.runner_type})"),
        (model.is_encoder_decoder, "encoder-decoder models have cross-attention"),
        (model.is_attention_free, "the model has no attention and so no KV cache (Mamba)"),
        (model.is_hybrid, "the model keeps recurrent state beside its KV cache (Mamba or hybrid)"),
        (
            getattr(model.hf_text_config, "llama_4_scaling", None),
            "queries are scaled by their absolute position",
        ),
        # Before a connector is attached: beside one, its decoding returns nothing for C8, and reads FAKQuant as floats.
        (
            is_ascend() and quantizes_kv(model),
            "vLLM-Ascend quantizes its KV cache (C8), and is wrong beside connectors",
        ),
    ]
    return _first(checks)


def _keeping_reason(model: ModelConfig) -> str | None:
    """The reason against the cache where all blocks stay, if any."""
    checks: list[tuple[Any, str]] = [
        # Seen with vLLM 0.32.0: without its hybrid KV cache manager it can't start such a model.
        (_shares_kv_of_two_sizes(model.hf_text_config), "layers that share KV have heads of two sizes"),
        # Seen with vLLM 0.32.0 alone, with two threads.
        (
            current_platform.is_cpu() and model.hf_text_config.model_type == "gpt_oss",
            "without its hybrid KV cache manager, vLLM's CPU attention is wrong for windows with attention sinks",
        ),
    ]
    return _first(checks)
