# SPDX-License-Identifier: Apache-2.0
"""What is drawn of a workload, and how large."""

import warnings
from typing import get_args

import numpy as np
import pytest
from matplotlib.image import imread

from measuring.speed.report.plots import draw
from measuring.speed.report.summary import rows_of
from measuring.speed.samples import Sample, System, Value
from tests.measuring.speed.report_helpers import context_samples, load_samples

SYSTEMS, VALUES = get_args(System), get_args(Value)


def drawn(samples, path):
    """Pixels in shares of white, without transparency; a layout that doesn't fit is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draw(rows_of(samples), "A title", "tokens", path / "plot.png")
    return imread(path / "plot.png")[..., :3]


def sample(point: str, system: System, values: dict[Value, float], number: int = 0) -> Sample:
    return Sample(workload="any", point=point, system=system, round=number, values=values)


@pytest.mark.parametrize("points", [("1024",), ("closed loop", "open loop")])
def test_lines_make_the_figure_as_high_as_they_need(points, tmp_path):
    few = drawn([sample(point, "stock", {"ttft_s": 1.0}) for point in points], tmp_path)
    more = drawn([sample(point, name, {"ttft_s": 1.0}) for point in points for name in SYSTEMS], tmp_path)
    assert few.shape[1] == more.shape[1] == 900
    assert more.shape[0] - few.shape[0] == 30 * len(points) * (len(SYSTEMS) - 1)


def test_every_system_and_value_can_be_drawn(tmp_path):
    values = {value: 0.1 + i for i, value in enumerate(VALUES)}
    assert drawn([sample("one", system, values) for system in SYSTEMS], tmp_path).shape[1] == 900


def test_each_sample_moves_what_is_drawn(tmp_path):
    samples = [sample(point, "warm", {"ttft_s": 1.0}, number) for point in ("1024", "2048") for number in range(3)]
    slower = [*samples[:-1], sample("2048", "warm", {"ttft_s": 3.0}, 2)]
    assert not np.array_equal(drawn(samples, tmp_path), drawn(slower, tmp_path))


@pytest.mark.parametrize("seconds", [0.0, 1e-5, 1e4])
def test_extreme_times_are_drawn(seconds, tmp_path):
    assert drawn([sample("one", "stock", {"tpot_s": seconds}), *load_samples()[:1]], tmp_path).shape[1] == 900


def test_colours_are_the_systems_own_in_every_plot(tmp_path):
    def blue(image) -> int:
        return int((np.abs(image - np.array([0x00, 0x72, 0xB2]) / 255).max(axis=2) < 0.01).sum())

    assert blue(drawn(context_samples(), tmp_path)) > 100
    assert blue(drawn(load_samples(), tmp_path)) > 100
    assert blue(drawn([s for s in load_samples() if s.system == "stock"], tmp_path)) == 0
