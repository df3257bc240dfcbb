# SPDX-License-Identifier: Apache-2.0
"""Prompts longer than the model was trained for, whose chunks stay near the question.

The position strategy is ``window``.

RoPE attention depends on distances alone. So indices may exceed the trained positions, if the engine's table of angles
is long enough and no token attends to one that is farther than the model has ever seen.
"""

from typing import Any, Final

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams

TRAINED_POSITIONS: Final = "tessera_trained_positions"
"""Field of the model's configuration in a running engine."""


def trained_positions(model: Any) -> int:
    """The longest prompt with its answer in full attention; ``model`` is vLLM's ``ModelConfig``."""
    limit: int = model.max_model_len
    return min(limit, getattr(model.hf_config, TRAINED_POSITIONS, limit))


def window_of(model: Any) -> int:
    """The default window of the strategy: half of the trained positions; question and answer have the other."""
    return trained_positions(model) // 2


def longest_chunk(model: Any) -> int:
    """Longest chunk, in tokens: half of the trained positions, if prompts may exceed them."""
    return trained_positions(model) if (limit := limit_of(model)) is None else limit // 2


def limit_of(model: Any) -> int | None:
    """The trained positions, if prompts may exceed them; ``None``: nothing exceeds vLLM's own limit."""
    limit = trained_positions(model)
    return limit if limit < model.max_model_len else None


def within_positions(limit: int, reach: int, params: SamplingParams) -> SamplingParams:
    """The parameters, with an answer that stays within ``limit``, the trained positions.

    ``reach`` is the distance from the farthest token that the answer attends to. Raises ``VLLMValidationError``.
    """
    if reach >= limit:
        raise VLLMValidationError(
            f"the prompt spans {reach} positions, and the model was trained for {limit}; more fit as documents, "
            "in chunks of their own and with window positions",
            parameter="prompt",
        )
    if params.max_tokens is None or params.max_tokens > limit - reach:
        params = params.clone()
        params.max_tokens = limit - reach
        params.min_tokens = min(params.min_tokens, params.max_tokens)
    return params
