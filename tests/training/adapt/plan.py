# SPDX-License-Identifier: Apache-2.0
"""The plan that tests of training vary."""

from typing import Final

from training.adapt.trainer import Plan

PLAN: Final = Plan(
    model="m",
    weights="w",
    documents="d",
    positions=("offset",),
    steps=12,
    seed=0,
    passage_tokens=128,
    chunks=(2, 3),
    tasks=2,
    questions=None,
    rank=4,
)
