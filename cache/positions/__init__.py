# SPDX-License-Identifier: Apache-2.0
"""Positions of segments in a prompt."""
