# SPDX-License-Identifier: Apache-2.0
"""Eviction policies, quotas and pins."""
