# SPDX-License-Identifier: Apache-2.0
import pytest

from app.documents.cache_options import CacheField
from app.modes import CALIBRATED, cache_field, in_order, is_mode, mode_of
from engine_ext.client.request import CacheOptions


@pytest.mark.parametrize("mode", [*CALIBRATED, "link-5", "offset%25", "shared%5"])
def test_what_is_asked_for_is_what_the_report_is_of(mode):
    options = CacheField(**cache_field(mode)).options(None, CacheOptions(link_tokens=5))
    report = {
        "mode": "full" if options.mode == "full" else "chunked",
        "position_strategy": options.position_strategy,
        "budget_share": options.sparse.budget_share if options.sparse else 1,
    }
    if options.link_tokens:
        report["links"] = {"tokens": options.link_tokens, "context": options.link_context}
    assert mode_of(report) == mode


def test_names():
    assert all(map(is_mode, [*CALIBRATED, "link-1", "link-1024"]))
    assert not any(map(is_mode, ["", "chunked", "link", "link-0", "link-08", "link-1025", "link-99999", "link-1.5"]))
    assert all(map(is_mode, ["offset%1", "parallel%99"]))
    assert not any(map(is_mode, ["full%25", "link-8%25", "offset%", "offset%0", "offset%100", "offset%2.5", "%25"]))
    assert in_order(["link-16", "offset%25", "offset", "full", "link-8", "shared", "full"]) == [
        "full",
        "shared",
        "offset",
        "offset%25",
        "link-8",
        "link-16",
    ]
