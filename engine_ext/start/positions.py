# SPDX-License-Identifier: Apache-2.0
"""Longer prompts than the model was trained for (:mod:`engine_ext.client.position_limit`)."""

import os
from typing import Any

from vllm.config import ModelConfig
from vllm.engine.arg_utils import AsyncEngineArgs

from cache.positions.layout import PositionStrategy
from engine_ext.client.position_limit import TRAINED_POSITIONS
from engine_ext.start.support import DRAFTS_BY_TEXT, UnsupportedFlagError


def model_config(engine_args: AsyncEngineArgs, strategy: PositionStrategy | None) -> ModelConfig:
    """Create vLLM's configuration of the model; window positions may exceed the trained ones.

    Raises :class:`UnsupportedFlagError`, and vLLM's errors for models that can't be loaded.
    """
    if strategy is PositionStrategy.WINDOW:
        extend_positions(engine_args)
    return engine_args.create_model_config()


def extend_positions(engine_args: AsyncEngineArgs) -> None:
    """Lets ``max_model_len`` exceed the trained positions; raises :class:`UnsupportedFlagError` if they are scaled."""
    asked, engine_args.max_model_len = engine_args.max_model_len, None
    model = engine_args.create_model_config()
    engine_args.max_model_len = asked
    if asked is None or asked <= model.max_model_len:
        return
    rope = getattr(model.hf_config, "rope_parameters", None) or {}
    drafts = engine_args.speculative_config
    checks: list[tuple[Any, str]] = [
        (rope.get("rope_type") != "default", "its RoPE is not a plain one"),
        (not isinstance(engine_args.hf_overrides, dict), "--hf-overrides is a function"),
        (drafts and drafts.get("method") not in DRAFTS_BY_TEXT, "a draft model has its own positions"),
    ]
    if reason := next((reason for holds, reason in checks if holds), None):
        raise UnsupportedFlagError(
            f"--max-model-len {asked} exceeds the {model.max_model_len} positions that the model was trained for, "
            f"and window positions can't go beyond them: {reason}"
        )
    engine_args.hf_overrides |= {"max_position_embeddings": asked, TRAINED_POSITIONS: model.max_model_len}
    os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"  # tokenizers have a limit as well
