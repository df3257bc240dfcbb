# SPDX-License-Identifier: Apache-2.0
"""Environment of a server that runs the CPU as vLLM runs GPUs."""

from pathlib import Path

RUNTIME = Path(__file__).parents[1] / "engine" / "gpu_runtime"
