# SPDX-License-Identifier: Apache-2.0
"""Tessera's own endpoints, added to vLLM's app."""
