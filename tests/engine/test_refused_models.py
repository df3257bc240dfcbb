# SPDX-License-Identifier: Apache-2.0
"""Models whose KV can't be repositioned are served with the cache off, and the reason in every report."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)

from tests.engine.conftest import COMMON
from tests.engine.server import ServerPool
from tests.support.saved_models import alibi, saved

pytestmark = pytest.mark.matrix


def sliding_window(vocab_size: int) -> PreTrainedModel:
    config = MistralConfig(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        sliding_window=64,
    )
    return MistralForCausalLM(config)


def mamba(vocab_size: int) -> PreTrainedModel:
    return MambaForCausalLM(MambaConfig(vocab_size=vocab_size, hidden_size=128, num_hidden_layers=2, state_size=16))


@pytest.mark.parametrize(
    ("build", "words", "runs"),
    [
        (sliding_window, "sliding-window attention in every layer (64 tokens)", True),
        (alibi, "ALiBi", True),
        # vLLM's CPU build lacks Mamba's kernels: it starts, but can't run a request.
        pytest.param(mamba, "Mamba", False),
    ],
)
def test_served_with_the_cache_off(
    build: Callable[[int], PreTrainedModel],
    words: str,
    runs: bool,
    pool: ServerPool,
    model_path: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = saved(build, model_path("tiny-llama"), tmp_path_factory.mktemp(build.__name__))
    flags = [flag if flag != "8192" else "1024" for flag in COMMON]
    server = pool.get(str(folder), "--dtype", "float32", *flags)
    assert words in server.log.read_text()
    stats = server.client.get("/v1/cache/stats").json()
    assert stats["enabled"] is False
    assert words in stats["reason"]
    if not runs:
        return
    body: dict[str, Any] = {
        "chunks": ["a chunk", "another"],
        "question": "?",
        "max_tokens": 3,
        "ignore_eos": True,
    }
    response = server.chat(**body)
    assert response["usage"]["completion_tokens"] == 3
    report = response["cache"]
    assert report["mode"] == "full"
    assert words in report["reason"]
    assert report["chunks"][1] == {"index": 1, "id": None, "key": None, "tokens": 9, "status": None}
