# SPDX-License-Identifier: Apache-2.0
"""Measurements: ratios taken side by side in one run, over HTTP."""
