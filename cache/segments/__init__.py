# SPDX-License-Identifier: Apache-2.0
"""Cached segments: their keys, entries, ids and documents."""
