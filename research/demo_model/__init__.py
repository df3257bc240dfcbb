# SPDX-License-Identifier: Apache-2.0
"""The demo model: its language of invented facts, its tokenizer and its training."""
