# SPDX-License-Identifier: Apache-2.0
"""What vLLM calls first in each process of an engine, because pyproject.toml names it as a plugin."""

import os
from collections.abc import Iterable
from typing import Final

from tools.process_watch import end_with_parent

_SHIFTED: Final = "_TESSERA_SHIFTED_ARCHITECTURES"


def load() -> None:
    """Watches over the parent, and wraps the model's class if positions are to be shifted.

    Does nothing in other engines' processes, which have the plugin, too.
    """
    end_with_parent()
    if architectures := os.environ.get(_SHIFTED):
        from engine_ext.core.shifts import register_shifted_models  # takes seconds to import

        register_shifted_models(architectures.split(","))


def shift_positions(architectures: Iterable[str]) -> None:
    """Says to the processes of an engine that is started next that models of these classes are to be wrapped."""
    os.environ[_SHIFTED] = ",".join(architectures)
