# SPDX-License-Identifier: Apache-2.0
"""Collections: files kept as passages, and the passages that a question needs."""
