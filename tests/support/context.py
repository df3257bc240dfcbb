# SPDX-License-Identifier: Apache-2.0
"""A server's context without an engine."""

from types import SimpleNamespace
from typing import Any

from app.context import ServerContext
from app.prompt.marks import Marks
from app.settings import Settings
from engine_ext.chunks.cache_off import CacheOff


def make_context(**fields: Any) -> ServerContext:
    """A context with these fields; by default its chunk cache is off and its settings are the default ones."""
    engine = SimpleNamespace(cache=CacheOff("switched off"))
    return ServerContext(
        **{"engine": engine, "settings": Settings(), "retrieval": None, "marks": Marks(), "extraction": None, **fields}
    )
