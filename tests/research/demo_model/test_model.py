# SPDX-License-Identifier: Apache-2.0
"""The row-wise forward equals the plain model on each branch alone; initial heads look back."""

import random
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from research.demo_model.batches import FIRST_TOKEN_WEIGHT, STRATEGIES, make_batch, repeat_sample
from research.demo_model.initialisation import look_back
from research.demo_model.model import forward
from tests.research.demo_model.samples import SAMPLES, alone


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_rows_equal_single_sequences(strategy: str, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: torch.no_grad())  # float32: equal up to rounding
    plain = LlamaForCausalLM(deepcopy(model.config))
    plain.load_state_dict(model.state_dict())
    plain.set_attn_implementation("eager")
    losses, weights = [], []
    for sample in SAMPLES:
        for number, branch in enumerate(sample.branches):
            ids, positions, visible = alone(sample, strategy, number)
            mask = torch.zeros(visible.shape).masked_fill(~visible, float("-inf"))[None, None]
            with torch.no_grad():
                logits = plain(torch.tensor([ids]), position_ids=torch.tensor([positions]), attention_mask=mask).logits
            answer = torch.tensor(branch.answer)
            losses.append(cross_entropy(logits[0, -len(answer) :], answer, reduction="none"))
            weights.append(torch.tensor([FIRST_TOKEN_WEIGHT] + [1.0] * (len(answer) - 1)))
    loss, _ = forward(model, make_batch(SAMPLES, [strategy] * len(SAMPLES)))
    expected = torch.cat(losses) @ torch.cat(weights) / torch.cat(weights).sum()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-5)


def test_the_first_layers_heads_look_back(model: Any) -> None:
    look_back(model, range(1, 9))
    batch = make_batch([repeat_sample(random.Random(0), 2048, 100, 1, 1)], ["full"])
    layer, heads = model.model.layers[0], model.config.num_attention_heads
    normalised = layer.input_layernorm(model.model.embed_tokens(batch.ids))
    query, key = (
        projection(normalised).view(1, -1, heads, model.config.head_dim).transpose(1, 2)
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj)
    )
    query, key = apply_rotary_pos_emb(query, key, *model.model.rotary_emb(normalised, batch.positions))
    scores = (query @ key.transpose(-1, -2) * layer.self_attn.scaling).masked_fill(~batch.mask, float("-inf"))
    for row in range(12, 20):
        assert [row - int(place) for place in scores[0, :, row].argmax(-1)] == list(range(1, 9))
