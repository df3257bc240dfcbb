# SPDX-License-Identifier: Apache-2.0
"""Attention over the chunk pool: a step's plan, and the kernels that compute it."""
