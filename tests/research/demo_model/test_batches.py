# SPDX-License-Identifier: Apache-2.0
"""Training rows match serving: each branch is laid out as by the oracle alone."""

import pytest
import torch

from research.demo_model.batches import STRATEGIES, Batch, make_batch
from research.demo_model.curriculum import CURRICULUM
from tests.research.demo_model.samples import SAMPLES, alone


def cut_out(batch: Batch, row: int, branch: int) -> torch.Tensor:
    """Indices in `row` of the context's tokens and of one branch's."""
    context = batch.mask[row, 0, batch.branch[row] == branch].any(0)  # a branch sees all of it without padding
    context[batch.context :] = False
    return (context | (batch.branch[row] == branch)).nonzero()[:, 0]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_branch_is_what_the_oracle_lays_out(strategy: str) -> None:
    batch = make_batch(SAMPLES, [strategy] * len(SAMPLES))
    for row, sample in enumerate(SAMPLES):
        for branch in range(len(sample.branches)):
            ids, positions, visible = alone(sample, strategy, branch)
            places = cut_out(batch, row, branch)
            assert batch.ids[row, places].tolist() == ids
            assert batch.positions[row, places].tolist() == positions
            assert torch.equal(batch.mask[row, 0][places][:, places], visible)
            elsewhere = torch.ones(batch.ids.shape[1], dtype=torch.bool)
            elsewhere[places] = False
            assert not batch.mask[row, 0][places][:, elsewhere].any()


def test_targets_are_the_answers() -> None:
    batch = make_batch(SAMPLES, STRATEGIES)
    for row, sample in enumerate(SAMPLES):
        for number, branch in enumerate(sample.branches):
            targets = batch.targets[row][batch.branch[row] == number]
            assert targets.tolist() == [-100] * (len(branch.prompt) - 1) + branch.answer


@pytest.mark.parametrize("stage", CURRICULUM, ids=lambda stage: stage.name)
def test_a_batch_is_a_function_of_stage_seed_step_and_split(stage, encoder) -> None:
    def ids(seed: int, step: int, split: str) -> list[int]:
        return stage.batch(seed, step, split, encoder).ids.flatten().tolist()

    assert ids(0, 0, "train") == ids(0, 0, "train")
    others = ((0, 0, "train"), (0, 1, "train"), (1, 0, "train"), (0, 0, "heldout"))
    assert len({tuple(ids(*which)) for which in others}) == 4
