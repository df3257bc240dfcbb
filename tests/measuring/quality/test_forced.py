# SPDX-License-Identifier: Apache-2.0
"""Tokens that a request names are the only ones left, one after the other."""

import pytest
import torch
from vllm.sampling_params import SamplingParams

from measuring.quality.client import FORCED_TOKENS
from measuring.quality.forced import ForcedTokens


def processor(extra_args):
    made = ForcedTokens(None, torch.device("cpu"), False)
    return made.new_req_logits_processor(SamplingParams(extra_args=extra_args))


@pytest.mark.parametrize("extra_args", [None, {}, {"other": [1]}, {FORCED_TOKENS: []}])
def test_requests_that_name_none_are_left_alone(extra_args):
    assert processor(extra_args) is None


def test_each_step_has_its_token():
    only_next = processor({FORCED_TOKENS: [3, "1"]})
    logits = torch.tensor([0.0, 1.0, 9.0, -5.0])
    assert only_next([], logits).tolist() == [float("-inf")] * 3 + [-5.0]
    assert only_next([3], logits).argmax() == 1
    assert only_next([3, 1], logits) is logits
    assert logits.tolist() == [0.0, 1.0, 9.0, -5.0]
