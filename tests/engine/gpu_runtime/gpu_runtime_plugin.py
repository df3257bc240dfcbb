# SPDX-License-Identifier: Apache-2.0
"""vLLM's plugin for the platform, apart from it: a plugin is loaded before vLLM can be imported."""

import os
from types import SimpleNamespace


def platform() -> str:
    """The class's name. Model runner V2 needs Triton, whose interpreter runs vLLM's kernels on the CPU.

    ``VLLM_USE_V2_MODEL_RUNNER=0`` is the runtime with V1.
    """
    if os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "1") == "1":
        os.environ["TRITON_INTERPRET"] = "1"
        from triton.backends import Backend, backends

        backends["cpu"] = Backend(compiler=None, driver=SimpleNamespace(is_active=lambda: True))
    return "gpu_runtime_platform.GpuRuntimePlatform"
