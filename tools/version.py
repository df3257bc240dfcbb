# SPDX-License-Identifier: Apache-2.0
"""Which Tessera this is."""

import importlib.metadata


def tessera_version() -> str:
    """Of the installed package; ``not installed`` where it runs from its source alone."""
    try:
        return importlib.metadata.version("tessera-rag")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
