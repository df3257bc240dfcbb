# SPDX-License-Identifier: Apache-2.0
"""Nonsensical sizes are refused."""

import pytest

from cache.config import ChunkCacheConfig


@pytest.mark.parametrize("field", ["num_pages", "page_tokens"])
def test_sizes_must_be_positive(field):
    sizes = {"num_pages": 1, "page_tokens": 1, field: 0}
    with pytest.raises(ValueError, match=f"{field} must be at least 1, got 0"):
        ChunkCacheConfig(**sizes, fingerprint="")


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_a_segment_takes_whole_pages(tokens, pages):
    assert ChunkCacheConfig(1, 16, "").pages_for(tokens) == pages
