# SPDX-License-Identifier: Apache-2.0
"""Tessera's version."""

import importlib.metadata


def tessera_version() -> str:
    """Version of the installed package; ``not installed`` when run from source."""
    try:
        return importlib.metadata.version("tessera-rag")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
