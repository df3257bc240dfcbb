# SPDX-License-Identifier: Apache-2.0
"""Flags of a server with a small pool."""

PAGES = 40


# 4 layers x 2 KV heads x 64 x (K and V) x 4 bytes = 4096 bytes a token, 32 tokens a page.
SMALL = ("--chunk-cache-memory", str(PAGES * 32 * 4096), "--chunk-max-tokens", "64")
