# SPDX-License-Identifier: Apache-2.0
"""Checks for a machine with an accelerator, run by `scripts/check_gpu.py` and `scripts/check_npu.py`."""
