# SPDX-License-Identifier: Apache-2.0
"""A server's context without an engine, and applications with some of its endpoints."""

from types import SimpleNamespace
from typing import Any

from fastapi import APIRouter, FastAPI
from httpx import AsyncClient

from app.context import ServerContext
from app.documents.patterns import PATTERNS
from app.errors import answer_errors
from app.prompt.marks import Marks
from app.settings import Settings
from engine_ext.chunks.cache_off import CacheOff
from tests.serving import client_of


def make_context(**fields: Any) -> ServerContext:
    """A context with these fields; by default its chunk cache is off and its settings are the default ones."""
    engine = SimpleNamespace(cache=CacheOff("switched off"))
    usual = {"engine": engine, "settings": Settings(), "retrieval": None, "patterns": PATTERNS, "marks": Marks()}
    return ServerContext(**{**usual, "extraction": None, **fields})


def client_with(router: APIRouter, **state: Any) -> AsyncClient:
    """A client of a router's endpoints; ``state`` is the application's."""
    app = FastAPI()
    app.include_router(router)
    answer_errors(app)
    for name, value in state.items():
        setattr(app.state, name, value)
    return client_of(app)
