# SPDX-License-Identifier: Apache-2.0
"""Versions of what is installed."""

import importlib.metadata
from collections.abc import Mapping
from functools import cache


def tessera_version() -> str:
    """Version of the installed package; ``not installed`` when run from source."""
    try:
        return importlib.metadata.version("tessera-rag")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


@cache
def distributions() -> Mapping[str, list[str]]:
    """Distributions by the modules that they bring. Slow: reads every distribution's metadata."""
    return importlib.metadata.packages_distributions()


def version_of(module: str) -> str:
    """The version of a module's distribution, for people."""
    for name in [module, *distributions().get(module, ())]:
        try:
            return importlib.metadata.distribution(name).version
        except importlib.metadata.PackageNotFoundError:
            continue
    return "of unknown version"
