# SPDX-License-Identifier: Apache-2.0
"""Checks for a machine with an accelerator, run by `research/check_gpu.py` and `research/check_npu.py`."""
