# SPDX-License-Identifier: Apache-2.0
"""The model that is served where none is named: SmolLM2, or, where it can't be had, the tiny demo model."""

from typing import Final

from app.models.demo_model import DEMO_MODEL
from app.models.packaged_models import MODELS, PackagedModelError, is_there, packaged_model
from tools.progress import say

_SMALL: Final = MODELS["smollm2"]
DEFAULT_MODEL_FLAGS: Final = ("--enforce-eager",)
"""Flags to serve it with: compiling such a small model takes longer than it saves."""


def default_model() -> str:
    """The folder of the default model, which is downloaded first if it is not there; says which model it is."""
    try:
        folder = packaged_model(_SMALL.name)
    except PackagedModelError as error:
        say(f"{_SMALL.title} can't be had: {error}")
        say("serving the tiny demo model instead, which answers from short documents of its own kind only")
        return str(DEMO_MODEL)
    say(f"{_SMALL.title} has 135 M parameters and is often wrong; serve your own model with: tessera serve MODEL")
    return str(folder)


def present_model() -> str:
    """The default model's folder if it is there, else the tiny demo model's: nothing is downloaded."""
    return str(_SMALL.folder if is_there(_SMALL) else DEMO_MODEL)
