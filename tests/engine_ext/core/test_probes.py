# SPDX-License-Identifier: Apache-2.0
"""Probes: the attention that they compute and measure, whatever the steps in which they run."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from cache.windows import Window
from engine_ext.core.attention import probes as module
from engine_ext.core.attention.probes import Probes
from engine_ext.core.attention.rows import BatchRow
from engine_ext.wire.plan import Span, TransferPlan
from kernels.layout import PagedTensor
from kernels.paged import LayerKV
from kernels.rope import RotaryFrequencies, rotate_keys, rotation_angles

PAGE, HEADS, KV_HEADS, SIZE, SCALE = 4, 6, 2, 16, 0.3
FREQUENCIES = RotaryFrequencies(torch.tensor([0.9, 0.4, 0.1, 0.03, 0.01, 0.004, 0.001, 0.0], dtype=torch.float64), True)
SPANS = (Span(0, 5, 0, 1, (3, 9)), Span(5, 7, 4, 2, (1, 0, 8), skipped=3), Span(12, 3, -2, 3, (5,)))
CONTEXT, LENGTHS, ENDS = 15, (6, 4), (6, 10)
NAMES = ("first", "measured", "behind")
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


class Given:
    """A layer with a pool, and the own tokens' queries, keys at their places, and values."""

    def __init__(self, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        pools = [torch.randn(10, PAGE, KV_HEADS, SIZE).to(dtype) for _ in "kv"]
        self.layer = LayerKV(*map(PagedTensor.of, pools), *pools, FREQUENCIES)
        self.query = torch.randn(ENDS[-1], HEADS, SIZE).to(dtype)
        self.key, self.value = (torch.randn(ENDS[-1], KV_HEADS, SIZE).to(dtype) for _ in "kv")
        layers = dict.fromkeys(NAMES[:2], self.layer)
        self.probes = Probes(layers, frozenset(["measured"]))
        windows = tuple(Window(CONTEXT, length, CONTEXT) for length in LENGTHS)
        plan = TransferPlan(SPANS, attends=True, probe=7, probed_from=2, windows=windows)
        self.probes.update({"probe": plan}, [])

    def run(self, first: int, end: int) -> dict[str, Tensor]:
        """A step with the own tokens ``[first, end)``, behind another request's two: outputs by layer."""
        step = self.probes.step([BatchRow("probe", 2, end - first, CONTEXT + end, ())])
        found = {}
        for name in NAMES:
            output = torch.full((2 + end - first, HEADS, SIZE), torch.nan)
            given = (torch.cat([each[:2], each[first:end]]) for each in (self.query, self.key, self.value))
            self.probes.attend(name, *given, output, step, SCALE)
            assert output[:2].isnan().all()
            found[name] = output[2:]
        return found

    def expected(self) -> tuple[Tensor, Tensor]:
        """Outputs ``[tokens, heads, D]``, and attention ``[tokens, context]`` on average over heads, in float64."""
        outputs, paid = [], []
        for token in range(ENDS[-1]):
            first = 0 if token < ENDS[0] else ENDS[0]
            keys = [self.turned(self.rows(span, self.layer.key_pool), span.delta) for span in SPANS]
            keys.append(self.turned(self.key[first : token + 1], -first))
            values = [self.rows(span, self.layer.value_pool) for span in SPANS] + [self.value[first : token + 1]]
            query = self.turned(self.query[token : token + 1], -first)[0].double()
            k, v = (torch.cat(each).double().repeat_interleave(HEADS // KV_HEADS, 1) for each in (keys, values))
            weights = (torch.einsum("hd,khd->hk", query, k) * SCALE).softmax(-1)
            outputs.append(torch.einsum("hk,khd->hd", weights, v))
            paid.append(weights[:, :CONTEXT].mean(0))
        return torch.stack(outputs), torch.stack(paid)

    def rows(self, span: Span, pool: Tensor) -> Tensor:
        return pool[list(span.pages)].flatten(0, 1)[span.skipped : span.skipped + span.length]

    def turned(self, keys: Tensor, delta: int) -> Tensor:
        return rotate_keys(keys, *rotation_angles(FREQUENCIES, torch.tensor([delta])), True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("most_logits", [1, 1 << 24])
@pytest.mark.parametrize(
    "steps",
    [
        pytest.param([(0, 10)], id="at once"),
        pytest.param([(0, 1), (1, 8), (8, 10)], id="in parts"),
        pytest.param([(0, 8), (0, 3), (3, 10)], id="preempted"),
        pytest.param([(0, 8), (4, 10)], id="preempted, with blocks found"),
    ],
)
def test_attention_is_computed_and_measured(steps, most_logits, dtype, monkeypatch):
    monkeypatch.setattr(module, "_MOST_LOGITS", most_logits)
    given, tolerance = Given(dtype), TOLERANCES[dtype]
    outputs, paid = given.expected()
    for first, end in steps:
        found = given.run(first, end)
        for name in NAMES[:2]:
            torch.testing.assert_close(found[name].double(), outputs[first:end], rtol=0, atol=tolerance)
        assert (found["behind"] == 0).all()
    starts = [span.start for span in SPANS]
    measured = given.probes.take(7)
    for (first, end), (rows, weights, by_token) in zip(pairwise((0, *ENDS)), measured, strict=True):
        assert rows == end - first
        np.testing.assert_allclose(weights, paid[first:end].sum(0), atol=(end - first) * tolerance)
        by_span = np.add.reduceat(paid[first + 2 : end].numpy(), starts, axis=1)
        np.testing.assert_allclose(np.frombuffer(by_token, np.float32).reshape(by_span.shape), by_span, atol=tolerance)
    assert given.probes.take(7) == []


def test_products_are_of_the_models_dtype_only_here():
    matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = matmul.fp32_precision
    Given(torch.bfloat16).run(0, 10)
    assert matmul.fp32_precision == before


def test_ended_probes_take_no_part():
    given = Given(torch.float32)
    assert not given.probes.is_idle
    given.probes.update({}, ["probe"])
    assert given.probes.is_idle
    assert given.probes.step([BatchRow("probe", 0, 3, CONTEXT + 3, ())]) == []
