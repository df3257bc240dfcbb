# SPDX-License-Identifier: Apache-2.0
"""Prefixes of prompts in tiers, behind vLLM's OffloadingConnector."""
