# SPDX-License-Identifier: Apache-2.0
"""The demo model: a standard Llama, with attention over rows of documents and branches."""

from typing import Any

import torch
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

from research.demo_model.batches import Batch
from research.demo_model.tokenizer import END, SPECIAL_TOKENS, VOCABULARY

MAX_LENGTH = 8192


def new_model(seed: int, positions: int = MAX_LENGTH) -> LlamaForCausalLM:
    """A Llama with random weights for this many positions."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=positions,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=SPECIAL_TOKENS.index(END),
        pad_token_id=SPECIAL_TOKENS.index(END),
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():  # as GPT-2 does: keeps the layers' output from drowning a token's embedding
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter /= (2 * config.num_hidden_layers) ** 0.5
    model.set_attn_implementation("branches")
    return model


def _branch_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attention in two parts, since the context sees no branch: a third less work."""
    context = options["context"]
    parts = [
        scaled_dot_product_attention(
            query[:, :, rows], key[:, :, :end], value[:, :, :end], attn_mask=attention_mask[:, :, rows, :end]
        )
        for rows, end in ((slice(0, context), context), (slice(context, None), query.shape[2]))
    ]
    return torch.cat(parts, dim=2).transpose(1, 2), None


AttentionInterface.register("branches", _branch_attention)


def is_bfloat16_quick(device: str) -> bool:
    """Whether bfloat16 is fast; a CPU without its instructions is 100 times slower."""
    return device != "cpu" or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def forward(model: LlamaForCausalLM, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Weighted mean loss over answer tokens, and whether each is the likeliest token."""
    device = batch.ids.device.type
    with torch.autocast(device, torch.bfloat16, enabled=is_bfloat16_quick(device)):
        hidden = model.model(
            input_ids=batch.ids,
            position_ids=batch.positions,
            attention_mask=batch.mask,
            use_cache=False,
            context=batch.context,
        ).last_hidden_state
        chosen = batch.targets >= 0
        logits = model.lm_head(hidden[chosen]).float()
    targets, weights = batch.targets[chosen], batch.weights[chosen]
    losses = cross_entropy(logits, targets, reduction="none")
    return (losses * weights).sum() / weights.sum(), logits.argmax(-1) == targets
