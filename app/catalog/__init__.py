# SPDX-License-Identifier: Apache-2.0
"""Cached chunks as clients see them: computed ahead, named, pinned, listed and dropped."""
