# SPDX-License-Identifier: Apache-2.0
"""Nonsensical sizes are refused."""

import pytest

from cache.config import ChunkCacheConfig


@pytest.mark.parametrize("field", ["num_pages", "page_tokens"])
def test_sizes_must_be_positive(field):
    with pytest.raises(ValueError, match=f"{field} must be at least 1, got 0"):
        ChunkCacheConfig(**{"num_pages": 1, "page_tokens": 1, field: 0}, fingerprint="")
