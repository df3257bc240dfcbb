# SPDX-License-Identifier: Apache-2.0
"""vLLM's plugin for the platform, apart from it: a plugin is loaded before vLLM can be imported."""


def platform() -> str:
    """The class's name."""
    return "gpu_runtime_platform.GpuRuntimePlatform"
