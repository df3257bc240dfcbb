# SPDX-License-Identifier: Apache-2.0
"""vLLM plugin (an entry point in pyproject.toml), called first in each process of an engine."""

import os
from collections.abc import Iterable
from typing import Final

from tools.process_watch import end_with_parent

_SHIFTED: Final = "_TESSERA_SHIFTED_ARCHITECTURES"


def load() -> None:
    """Ends the process with its parent, and wraps the model's class if positions are shifted.

    Does nothing in other engines' processes, which have the plugin, too.
    """
    end_with_parent()
    if architectures := os.environ.get(_SHIFTED):
        from engine_ext.core.shifts import register_shifted_models  # takes seconds to import

        register_shifted_models(architectures.split(","))


def shift_positions(architectures: Iterable[str]) -> None:
    """Makes the processes of the next engine wrap models of these classes."""
    os.environ[_SHIFTED] = ",".join(architectures)
