# SPDX-License-Identifier: Apache-2.0
"""Scripted replicas behind routers: real servers on the loopback interface, without engines."""

import asyncio
import threading
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from unittest.mock import patch

import httpx
import uvicorn
from starlette.responses import JSONResponse

from app.access.signed import signing
from app.cluster.router.app import build_app
from app.cluster.router.settings import RouterSettings
from machine.server_process import free_port
from replicas.redis_registry import RedisRegistry
from replicas.registry import RegistryError, Replica
from replicas.signing import HEADER, PeerKey

PREFIX, LEASE_S = "tessera:", 2.0


class StandIn:
    """An ASGI app in place of a replica's; `answer(scope, body, receive, send)` handles requests.

    `signs` those of peers that have its secret.
    """

    signs: PeerKey | None = None

    def __init__(self, name, role="both", *, hands_over=False):
        self.name = name
        self.role = role
        self.hands_over = hands_over
        self.answer = say_hello
        self.is_healthy = True
        self.requests = []
        self.disconnects = 0

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            return
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        if scope["path"] == "/health":
            await JSONResponse({}, 200 if self.is_healthy else 500)(scope, receive, send)
            return
        self.requests.append((scope, body))

        async def told():
            message = await receive()
            self.disconnects += message["type"] == "http.disconnect"
            return message

        signature = dict(scope["headers"]).get(HEADER.encode(), b"").decode()
        await self.answer(self, scope, told, signing(self.signs, signature, send) if self.signs else send)


async def say_hello(stand_in, scope, receive, send):
    await JSONResponse({"from": stand_in.name})(scope, receive, send)


async def hand_over(stand_in, scope, receive, send):
    address = {"do_remote_prefill": True, "remote_host": stand_in.name, "tessera_handover": {"version": 1}}
    await JSONResponse({"kv_transfer_params": address})(scope, receive, send)


async def say_busy(stand_in, scope, receive, send):
    await JSONResponse({"error": {"message": f"{stand_in.name} is busy"}}, 503)(scope, receive, send)


async def wait_for_disconnect(stand_in, scope, receive, send):
    while (await receive())["type"] != "http.disconnect":
        pass


async def begin_and_wait(stand_in, scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"begun", "more_body": True})
    await wait_for_disconnect(stand_in, scope, receive, send)


async def begin_and_break(stand_in, scope, receive, send):
    headers = [(b"content-length", b"1000")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"begun", "more_body": True})
    raise ConnectionResetError


async def stream(pieces, stand_in, scope, receive, send):
    headers = [(b"content-type", b"text/event-stream"), (b"content-encoding", b"gzip"), (b"x-own", b"1")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for piece in pieces:
        await send({"type": "http.response.body", "body": piece, "more_body": True})
        await asyncio.sleep(0.001)
    await send({"type": "http.response.body", "body": b""})


def streaming(pieces):
    return partial(stream, pieces)


@contextmanager
def serving(app, port=None):
    """Yields the URL of a real HTTP server for `app` in a thread."""
    port = port or free_port()
    config = uvicorn.Config(app, "127.0.0.1", port, log_level="critical", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            threading.Event().wait(0.01)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()


class Cluster:
    """Stand-ins registered in a real Redis, behind a router."""

    def __init__(self, redis_server, *stand_ins):
        self.redis_server = redis_server
        self.registry = RedisRegistry(redis_server.url, lease_s=LEASE_S, timeout_s=1)
        self.stand_ins = stand_ins
        self.replicas = []

    @asynccontextmanager
    async def running(self, **settings):
        with contextmanager(self._serving)() as urls:
            if secret := settings.get("peer_secret"):
                self.registry = RedisRegistry(self.redis_server.url, PeerKey(secret), lease_s=LEASE_S, timeout_s=1)
            for number, (stand_in, url) in enumerate(zip(self.stand_ins, urls, strict=True)):
                of_role = {"role": stand_in.role, "hands_over": stand_in.hands_over}
                replica = Replica(f"{number:012x}", stand_in.name, url, ("m",), "f", **of_role)
                self.replicas.append(replica)
                await self.registry.beat(replica)
            with patch.dict(RedisRegistry.__init__.__kwdefaults__, timeout_s=0.2):
                app = build_app(RouterSettings(registry=self.redis_server.url, **settings))
            with serving(app) as self.url:
                async with httpx.AsyncClient(base_url=self.url, timeout=30) as self.client:
                    yield self
        await self.registry.close()

    async def beat(self):
        for replica in self.replicas:
            with suppress(RegistryError):  # after a restart, the first use finds the connection closed
                await self.registry.leave(replica.id)
            await self.registry.beat(replica)

    def _serving(self, started=()):
        if len(started) == len(self.stand_ins):
            yield started
            return
        with serving(self.stand_ins[len(started)]) as url:
            yield from self._serving((*started, url))

    async def metric(self, name, **labels):
        shown = "{" + ",".join(f'{key}="{value}"' for key, value in labels.items()) + "}" if labels else ""
        lines = (await self.client.get("/metrics")).text.splitlines()
        return next((float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{name}{shown} ")), 0.0)

    async def names(self):
        return [replica["name"] for replica in (await self.client.get("/v1/cluster")).json()["replicas"]]
