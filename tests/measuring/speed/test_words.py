# SPDX-License-Identifier: Apache-2.0
"""Numbers and claims as people read them."""

from typing import get_args

import pytest

from measuring.speed.report.words import SYSTEMS, VALUES, digits, heading, legend, place, scaled, sentence
from measuring.speed.samples import Growth, Ratio, System, Value
from measuring.speed.verdicts import Verdict

RATIO = Ratio("context", "4096", "ttft_s", "stock", "warm", at_least=40)


def test_every_system_and_value_has_words():
    assert list(SYSTEMS) == list(get_args(System))
    assert list(VALUES) == list(get_args(Value))


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0.00"), (0.5, "0.500"), (0.0123, "0.0123"), (1, "1.00"), (41.83, "41.8"), (163.4, "163"), (38237.2, "38237")],
)
def test_numbers_have_the_digits_that_count(number, text):
    assert digits(number) == text


def test_times_are_in_milliseconds():
    assert (scaled("ttft_s", 0.25), heading("ttft_s")) == (250, "time to first token, ms")
    assert (scaled("requests_per_s", 0.25), heading("requests_per_s")) == (0.25, "requests per second")


def test_a_number_gets_the_name_of_its_axis():
    assert place("4096", "tokens of context") == "4096 tokens of context"
    assert place("batch 1", "batch") == "batch 1"


def test_the_legend_has_what_is_asked_for():
    assert legend(["stock", "warm"]) == "stock: stock vLLM; warm: Tessera, chunks cached"


@pytest.mark.parametrize(
    ("claim", "words"),
    [
        (RATIO, "stock / warm, time to first token at 4096 tokens: 41.8 (40.9 to 42.3), at least 40: holds"),
        (
            Growth("context", "1024", "16384", "latency_s", "warm", at_least=2, at_most=8),
            "warm, time to last token, 16384 tokens over 1024: 41.8 (40.9 to 42.3), at least 2, at most 8: holds",
        ),
    ],
)
def test_a_claim_is_a_sentence(claim, words):
    assert sentence(claim, Verdict(claim, 41.8, 40.9, 42.3, 6, "holds"), "tokens") == words


@pytest.mark.parametrize(
    ("outcome", "end"),
    [
        ("holds", "at least 40: holds"),
        ("does not hold", "40: does not hold"),
        ("undecided", "40: undecided after 5 rounds"),
        (None, "40"),
    ],
)
def test_it_ends_with_its_outcome(outcome, end):
    assert sentence(RATIO, Verdict(RATIO, 1.0, 1.0, 1.0, 5, outcome), "tokens").endswith(end)


def test_what_was_not_measured_neither_holds_nor_not():
    assert sentence(RATIO, None, "tokens").endswith("at 4096 tokens: not measured, at least 40")


def test_a_ratio_just_over_its_bound_does_not_look_like_it():
    claim = Ratio("chat", "128", "tpot_s", "tessera", "stock", at_most=1.03)
    verdict = Verdict(claim, 1.034, 1.03, 1.04, 6, "undecided")
    assert "1.034 (1.030 to 1.040), at most 1.03:" in sentence(claim, verdict, "")
