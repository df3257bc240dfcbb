# SPDX-License-Identifier: Apache-2.0
"""Frequencies of vLLM's RoPE modules without engine tests, since their models require torchvision."""

import pytest
import torch
from torch import Tensor
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import get_rope

from engine_ext.core.rotary import frequencies_of
from kernels.rope import rotate_keys, rotation_angles
from tests.support.ascend import Rope

HEAD = 64


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("delta", [1, 70, 900])
def test_keys_of_text_in_a_multimodal_model_turn_as_its_own_module_turns_them(is_interleaved: bool, delta: int) -> None:
    """M-RoPE has three positions per token, equal for text."""
    parameters = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [12, 10, 10]}
    with set_current_vllm_config(VllmConfig()):
        rope = get_rope(
            HEAD, 1024, rope_parameters={**parameters, "mrope_interleaved": is_interleaved}, dtype=torch.float32
        )
    assert type(rope).__name__.startswith("MRotary")
    frequencies = frequencies_of(rope, HEAD)
    keys = torch.randn(5, HEAD, generator=torch.Generator().manual_seed(0))
    here = torch.arange(5).expand(3, 5)
    _, computed = rope.forward_native(here, torch.zeros_like(keys), keys.clone())
    _, moved = rope.forward_native(here + delta, torch.zeros_like(keys), keys.clone())
    turned = rotate_keys(computed[:, None], *rotation_angles(frequencies, torch.tensor([delta])), is_neox=True)[:, 0]
    torch.testing.assert_close(turned, moved, atol=1e-4, rtol=0)


def test_a_part_behind_the_rest_of_the_head_must_have_neighbours_as_pairs() -> None:
    with set_current_vllm_config(VllmConfig()):
        by_style = {
            style: get_rope(HEAD, 1024, is_neox_style=style, rope_parameters={"rope_theta": 1e4}, dtype=torch.float32)
            for style in (False, True)
        }
    behind = frequencies_of(by_style[False], 3 * HEAD)
    assert behind.rotary_dim == 3 * HEAD
    assert not behind.inv_freq[:HEAD].any()
    assert torch.equal(behind.inv_freq[HEAD:], frequencies_of(by_style[False], HEAD).inv_freq)
    with pytest.raises(ValueError, match="halves of the last 64"):
        frequencies_of(by_style[True], 3 * HEAD)


def test_frequencies_are_computed_where_the_module_has_its_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices compute powers otherwise than CPUs: some 0.01 rad at position 100,000."""
    rope, devices = Rope(HEAD, is_neox_style=True), []

    def computed(self: Rope) -> Tensor:
        devices.append(torch.get_default_device())
        raise ValueError("seen")

    monkeypatch.setattr(Rope, "_compute_cos_sin_cache", computed)
    rope.cos_sin_cache = rope.cos_sin_cache.to("meta")
    with pytest.raises(ValueError, match="seen"):
        frequencies_of(rope, HEAD)
    assert devices == [torch.device("meta")]
