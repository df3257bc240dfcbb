# SPDX-License-Identifier: Apache-2.0
"""Requests whose prefixes go to tiers and are looked up there."""

from types import SimpleNamespace
from typing import Any

import pytest

from cache.segments.hashing import CacheScope
from engine_ext.chunks.prefixes import Prefixes


@pytest.mark.parametrize(
    ("scope", "num_prompt", "num_chunked", "is_kept"),
    [
        (CacheScope(), 256, 0, True),
        (CacheScope(), 255, 0, False),
        (CacheScope(), 1250, 1000, True),
        (CacheScope(), 1249, 1000, False),  # it would wait for a look-up that finds what is in the pool anyway
        (CacheScope(adapter="lora"), 1250, 0, False),
    ],
)
def test_only_what_tiers_may_keep_is_looked_up(scope, num_prompt, num_chunked, is_kept):
    transfers: Any = SimpleNamespace(keeps_prefixes=True)
    prefixes = Prefixes(SimpleNamespace(), lambda: transfers)  # type: ignore[arg-type]
    assert bool(prefixes.params(scope, num_prompt, num_chunked)) is is_kept
    assert (prefixes.num_waiting > 0) is is_kept
