# SPDX-License-Identifier: Apache-2.0
"""A worker's probes: each token counts once, at its distance from each segment."""

import pytest
import torch

from engine_ext.core.attention.probes import Probes
from engine_ext.core.attention.rows import BatchRow
from engine_ext.core.pages import PageTags, WrongPagesError
from engine_ext.wire.plan import Probe, TransferPlan
from kernels.layout import PagedTensor
from kernels.paged import LayerKV
from kernels.rope import RotaryFrequencies, rotate_keys, rotation_angles
from kernels.selection import POLICIES, shares

PAGE, HEADS, SIZE, SYSTEM, QUESTION = 4, 2, 16, 3, 5
FREQUENCIES = RotaryFrequencies(torch.tensor([1.0 / 10 ** (i / 4) for i in range(8)], dtype=torch.float64), True)
DELTAS = (2, -7)


@pytest.fixture
def pool() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(6, PAGE, HEADS, SIZE)


@pytest.fixture
def probes(pool: torch.Tensor) -> Probes:
    tags = PageTags(len(pool))
    tags.put([0, 1], 11)
    tags.put([3], 12)
    layer = LayerKV(PagedTensor.of(pool), PagedTensor.of(pool), pool, pool, FREQUENCIES)
    made = Probes({"layer 1": layer}, tags, POLICIES["attention"], lambda: ["other", "probe"])
    assert made.represent(1, [0, 1], 11, 6) == 6 * HEADS * SIZE * 4
    made.represent(2, [3], 12, 4)
    made.update({"probe": plan()}, [])
    return made


def plan() -> TransferPlan:
    return TransferPlan(probe=Probe(7, SYSTEM, ((1, DELTAS[0]), (2, DELTAS[1]))))


def run(probes: Probes, query: torch.Tensor, begin: int, end: int) -> None:
    """A step with two tokens of another request before the probe's tokens ``[begin, end)``."""
    rows = [BatchRow(0, 2, 2, ()), BatchRow(2, end - begin, end, ())]
    step = probes.step(rows)
    tokens = torch.cat([torch.full((2, *query.shape[1:]), torch.nan), query[begin:end]])
    probes.score("layer 0", tokens, step, 0.5)
    probes.score("layer 1", tokens, step, 0.5)


def expected(pool: torch.Tensor, query: torch.Tensor) -> list[float]:
    keys = [pool[[0, 1]].flatten(0, 1)[:6], pool[3]]
    turned = []
    for delta in DELTAS:
        cos, sin = rotation_angles(FREQUENCIES, torch.tensor([-delta]))
        turned.append(rotate_keys(query[SYSTEM:], cos, sin, True))
    policy = POLICIES["attention"]
    return shares(policy, turned, list(map(policy.represent, keys)), 0.5).tolist()


@pytest.mark.parametrize(
    "pieces",
    [
        [(0, 8)],
        [(3, 8)],
        [(0, 2), (2, 4), (4, 8)],
        [(0, 4), (4, 6), (0, 5), (5, 8)],  # preempted after six tokens
        [(0, 8), (8, 9)],
    ],
)
def test_each_token_of_the_question_counts_once(
    probes: Probes, pool: torch.Tensor, pieces: list[tuple[int, int]]
) -> None:
    query = torch.randn(SYSTEM + QUESTION + 1, 2 * HEADS, SIZE)
    for begin, end in pieces:
        run(probes, query, begin, min(end, SYSTEM + QUESTION))
    assert probes.take(7) == pytest.approx(expected(pool, query[: SYSTEM + QUESTION]), abs=1e-5)
    assert probes.take(7) is None
    probes.update({}, ["probe"])
    assert probes.step([BatchRow(0, 2, 2, ()), BatchRow(2, 1, 9, ())]) == []


def test_an_unknown_segment_has_no_scores(probes: Probes) -> None:
    probes.take(7)
    probes.forget([2])
    probes.update({"probe": plan()}, ["probe"])
    assert probes.take(7) is None


def test_forgotten_while_the_probe_runs(probes: Probes, pool: torch.Tensor) -> None:
    query = torch.randn(SYSTEM + QUESTION, HEADS, SIZE)
    run(probes, query, 0, 5)
    probes.forget([1])
    run(probes, query, 5, 8)
    probes.update({}, ["probe"])
    assert probes.take(7) == pytest.approx(expected(pool, query), abs=1e-5)


def test_pages_of_other_kv_are_not_read(probes: Probes) -> None:
    with pytest.raises(WrongPagesError):
        probes.represent(3, [0, 1], 12, 6)
