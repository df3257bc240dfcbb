# SPDX-License-Identifier: Apache-2.0
"""Makes the demo model: its language of invented facts, its tokenizer, and its training."""
