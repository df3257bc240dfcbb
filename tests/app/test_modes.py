# SPDX-License-Identifier: Apache-2.0
import pytest

from app.documents.cache_options import CacheField
from app.modes import MEASURING, MODES, cache_field, in_order, is_mode, mode_of, needs_attention
from engine_ext.client.request import CacheOptions


@pytest.mark.parametrize("mode", [*MODES, *MEASURING, "offset+5%", "offset~5%", "shared~15%", "offset%25", "shared%5"])
def test_what_is_asked_for_is_what_the_report_is_of(mode):
    options = CacheField(**cache_field(mode)).options(None, CacheOptions(recompute=0.05, reread=0.05))
    report = {
        "mode": "full" if options.mode == "full" else "chunked",
        "position_strategy": options.position_strategy,
        "budget_share": options.sparse.budget_share if options.sparse else 1,
        "recompute": options.recompute,
        "reread": options.reread,
    }
    assert mode_of(report) == mode or mode == "full"


def test_names():
    more = ["offset+1%", "offset+100%", "offset%1", "parallel%99", "offset%50+15%"]
    more += ["shared~15%", "parallel~1%", "offset~100%", "offset%50~15%"]
    assert all(map(is_mode, [*MODES, *MEASURING, *more]))
    wrong = ["", "chunked", "+5%", "offset+", "offset+0%", "offset+05%", "offset+101%", "offset+15", "shared+15%"]
    wrong += ["full+15%", "full%25", "offset+15%50", "offset%", "offset%0", "offset%100", "offset%2.5", "%25"]
    wrong += ["full~15%", "offset~", "offset~0%", "offset~15%+15%"]
    assert not any(map(is_mode, wrong))


def test_order_and_needs():
    ordered = ["full", "shared", "offset", "offset%25", "offset+15%", "offset+25%"]
    assert in_order(["offset+25%", "offset%25", "offset", "full", "offset+15%", "shared", "full"]) == ordered
    assert [each for each in ordered if needs_attention(each)] == ["offset%25", "offset+15%", "offset+25%"]
