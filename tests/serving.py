# SPDX-License-Identifier: Apache-2.0
"""Small applications served for tests, and calls in an event loop."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import httpx
import uvicorn
from starlette.types import ASGIApp

T = TypeVar("T")


@contextmanager
def served(app: ASGIApp, **options: Any) -> Iterator[str]:
    """Yields the URL of ``app``, served in a thread on a free loopback port."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="critical", **options))
    started = threading.Event()
    startup = server.startup

    async def announced(sockets=None) -> None:
        await startup(sockets)
        started.set()

    server.startup = announced
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    assert started.wait(60)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = server.force_exit = True
        thread.join(60)


def client_of(app: ASGIApp) -> httpx.AsyncClient:
    """A client of ``app`` in this process."""
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server")


def in_a_loop(function: Callable[[], T]) -> T:
    """Calls ``function`` in a new event loop; returns its result."""

    async def call() -> T:
        return function()

    return asyncio.run(call())
