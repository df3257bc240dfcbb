# SPDX-License-Identifier: Apache-2.0
"""Scripted replicas behind routers: real servers on the loopback interface, without engines."""

from contextlib import ExitStack, asynccontextmanager, suppress
from unittest.mock import patch

import httpx
from starlette.responses import JSONResponse

from app.access.signed import signing
from app.cluster.router.app import build_app
from app.cluster.router.settings import RouterSettings
from replicas.redis_registry import RedisRegistry
from replicas.registry import RegistryError, Replica
from replicas.signing import HEADER, PeerKey
from tests.serving import served

LEASE_S = 2.0


class StandIn:
    """An ASGI app in place of a replica's; `answer(scope, receive, send)` handles requests.

    `signs` those of peers that have its secret.
    """

    signs: PeerKey | None = None

    def __init__(self, name, role="both", *, hands_over=False):
        self.name = name
        self.role = role
        self.hands_over = hands_over
        self.answer = JSONResponse({"from": name})
        self.health = JSONResponse({})
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
            await self.health(scope, receive, send)
            return
        self.requests.append((scope, body))

        async def told():
            message = await receive()
            self.disconnects += message["type"] == "http.disconnect"
            return message

        signature = dict(scope["headers"]).get(HEADER.encode(), b"").decode()
        await self.answer(scope, told, signing(self.signs, signature, send) if self.signs else send)


def busy(name):
    return JSONResponse({"error": {"message": f"{name} is busy"}}, 503)


async def wait_for_disconnect(scope, receive, send):
    while (await receive())["type"] != "http.disconnect":
        pass


async def break_off(scope, receive, send):
    raise ConnectionResetError


def begun(then, *parts):
    """Sends a head that promises more, and these parts."""

    async def answer(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"1000")]})
        for part in parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await then(scope, receive, send)

    return answer


begin_and_wait, begin_and_break = begun(wait_for_disconnect, b"begun"), begun(break_off, b"begun")
send_head_and_wait, send_head_and_break = begun(wait_for_disconnect), begun(break_off)


class Cluster:
    """Stand-ins registered in a real Redis, behind a router."""

    def __init__(self, redis_server, *stand_ins):
        self.redis_server = redis_server
        self.stand_ins = stand_ins
        self.replicas = []

    @asynccontextmanager
    async def running(self, **settings):
        secret = settings.get("peer_secret")
        key = PeerKey(secret) if secret else None
        self.registry = RedisRegistry(self.redis_server.url, key, lease_s=LEASE_S, timeout_s=1)
        with ExitStack() as stack:
            for number, stand_in in enumerate(self.stand_ins):
                url = stack.enter_context(served(stand_in))
                of_role = {"role": stand_in.role, "hands_over": stand_in.hands_over}
                replica = Replica(f"{number:012x}", stand_in.name, url, ("m",), "f", **of_role)
                self.replicas.append(replica)
                await self.registry.beat(replica)
            with patch.dict(RedisRegistry.__init__.__kwdefaults__, timeout_s=0.2):
                app = build_app(RouterSettings(registry=self.redis_server.url, **settings))
            self.url = stack.enter_context(served(app))
            async with httpx.AsyncClient(base_url=self.url, timeout=30) as self.client:
                yield self
        await self.registry.close()

    async def beat(self):
        for replica in self.replicas:
            with suppress(RegistryError):  # after a restart, the first use finds the connection closed
                await self.registry.leave(replica.id)
            await self.registry.beat(replica)

    async def metric(self, name, **labels):
        shown = "{" + ",".join(f'{key}="{value}"' for key, value in labels.items()) + "}" if labels else ""
        lines = (await self.client.get("/metrics")).text.splitlines()
        return next((float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{name}{shown} ")), 0.0)

    async def about(self):
        """The router's view of the cluster."""
        return (await self.client.get("/v1/cluster")).json()

    async def names(self):
        return [replica["name"] for replica in (await self.about())["replicas"]]

    @property
    def asked(self):
        """The requests that replicas have got, with their bodies."""
        return [asked for stand_in in self.stand_ins for asked in stand_in.requests]
