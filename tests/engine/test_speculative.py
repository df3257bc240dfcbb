# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding over chunks: drafts come from the prompt, an EAGLE head or a small model; answers stay exact."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.server import TesseraServer
from tests.support.exactness import ask, assert_exact, assert_filled_hit_and_mixed_are_exact, statuses

pytestmark = pytest.mark.matrix

Text = Callable[[int], str]
STEPS = 60  # a random model's greedy answer repeats itself by then, so that drafts from the prompt are right


def eagle_head(model: Path, folder: Path) -> Path:
    """An EAGLE head: the model's first layer behind a random projection of token and hidden state."""
    folder.mkdir()
    tensors = {
        name.removeprefix("model."): tensor
        for name, tensor in load_file(model / "model.safetensors").items()
        if name.startswith("model.layers.0.") and "input_layernorm" not in name
    }
    config = json.loads((model / "config.json").read_text())
    size = config["hidden_size"]
    noise = torch.randn(size, 2 * size, generator=torch.Generator().manual_seed(0)) / 100
    tensors["fc.weight"] = torch.cat((0.3 * torch.eye(size), torch.eye(size)), dim=1) + noise
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    return folder


@pytest.fixture(
    scope="module",
    params=["ngram", "eagle", "draft_model"],
)
def method(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def speculation(method, model_path, tmp_path_factory) -> dict[str, Any]:
    model, options = model_path("tiny-llama"), {"method": method, "num_speculative_tokens": 2}
    if method == "ngram":
        return {**options, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    drafter = model if method == "draft_model" else eagle_head(model, tmp_path_factory.mktemp("eagle") / "head")
    return {**options, "model": str(drafter)}


@pytest.fixture
def server(serve: Any, speculation: dict[str, Any]) -> TesseraServer:
    return serve("tiny-llama", "--speculative-config", json.dumps(speculation))


def test_answers_are_exact(server: TesseraServer, method: str, oracle: Any, text: Text) -> None:
    drafted, accepted = (f"vllm:spec_decode_num_{kind}_tokens_total" for kind in ("draft", "accepted"))
    before = server.metric(drafted), server.metric(accepted)
    assert_filled_hit_and_mixed_are_exact(server, oracle("tiny-llama"), text, STEPS)
    num_drafted, num_accepted = server.metric(drafted) - before[0], server.metric(accepted) - before[1]
    assert num_accepted > 0
    if method == "draft_model":
        # The model drafts for itself: drafts are right if its layers' KV of the chunks is.
        assert num_accepted / num_drafted > 0.95
    # vLLM's prefix cache (whose last block EAGLE drops) hits composed blocks of the same layout.
    chunks, question = [text(300), text(200)], text(200)
    for status in ("filled", "hit", "hit"):
        response = ask(server, "shared", chunks, question)
        assert statuses(response) == [status] * 2
        assert_exact(response, oracle("tiny-llama"), "shared")
