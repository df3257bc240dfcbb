# SPDX-License-Identifier: Apache-2.0
import pytest

from app.documents.cache_options import CacheField
from app.modes import MEASURING, MODES, cache_field, in_order, is_mode, mode_of, needs_attention
from engine_ext.client.request import CacheOptions


@pytest.mark.parametrize("mode", [*MODES, *MEASURING, "offset+5%", "offset%25", "shared%5"])
def test_what_is_asked_for_is_what_the_report_is_of(mode):
    options = CacheField(**cache_field(mode)).options(None, CacheOptions(recompute=0.05))
    report = {
        "mode": "full" if options.mode == "full" else "chunked",
        "position_strategy": options.position_strategy,
        "budget_share": options.sparse.budget_share if options.sparse else 1,
        "recompute": options.recompute,
    }
    assert mode_of(report) == mode or mode == "full"


def test_names():
    assert all(map(is_mode, [*MODES, *MEASURING, "offset+1%", "offset+100%"]))
    wrong = [
        "",
        "chunked",
        "+5%",
        "offset+",
        "offset+0%",
        "offset+05%",
        "offset+101%",
        "offset+15",
        "shared+15%",
        "full+15%",
    ]
    assert not any(map(is_mode, [*wrong, "shared+15%"]))
    assert all(map(is_mode, ["offset%1", "parallel%99", "offset%50+15%"]))
    assert not any(map(is_mode, ["full%25", "offset+15%50", "offset%", "offset%0", "offset%100", "offset%2.5", "%25"]))
    assert in_order(["offset+25%", "offset%25", "offset", "full", "offset+15%", "shared", "full"]) == [
        "full",
        "shared",
        "offset",
        "offset%25",
        "offset+15%",
        "offset+25%",
    ]
    assert [needs_attention(each) for each in ("full", "shared", "offset%25", "offset+5%")] == [
        False,
        False,
        True,
        True,
    ]
