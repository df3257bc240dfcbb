# SPDX-License-Identifier: Apache-2.0
"""The plan that tests of training vary."""

from typing import Final

from training.adapt.students import SoftTokens
from training.adapt.trainer import Plan

PLAN: Final = Plan(
    model="m",
    documents="d",
    way="tokens",
    positions=("offset",),
    steps=12,
    seed=0,
    passage_tokens=128,
    chunks=(2, 3),
    tasks=2,
    questions=None,
    size=8,
    rate=SoftTokens.rate,
    full_weight=SoftTokens.full_weight,
)
