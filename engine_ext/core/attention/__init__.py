# SPDX-License-Identifier: Apache-2.0
"""Requests that attend to the chunk pool, and vLLM's attention backends extended by them."""
