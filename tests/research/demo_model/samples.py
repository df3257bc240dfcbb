# SPDX-License-Identifier: Apache-2.0
"""Samples of the demo model's training."""

import random

import torch

from research.demo_model.batches import Sample, repeat_sample
from tests import oracle

SAMPLES = [repeat_sample(random.Random(seed), 2048, 40, chunks, 3) for seed, chunks in enumerate((1, 4, 2))]


def alone(sample: Sample, strategy: str, branch: int) -> tuple[list[int], list[int], torch.Tensor]:
    """Ids, positions and visibility of one branch after its context, by the oracle."""
    question = [*sample.branches[branch].prompt, *sample.branches[branch].answer[:-1]]
    segments = (sample.system, sample.chunks, question)
    ids, positions, groups = oracle.lay_out_overlapping("shared", segments)
    if strategy != "shared":
        positions = list(range(len(ids)))
    if strategy == "full":
        groups = [oracle.TAIL] * len(ids)
    return ids, positions, oracle.mask(groups, groups, torch.float32)[0, 0] == 0
