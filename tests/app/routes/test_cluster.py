# SPDX-License-Identifier: Apache-2.0
"""``GET /v1/cluster`` of a replica."""

import pytest
from fastapi import FastAPI
from httpx import ASGITransport, AsyncClient

from app.routes.cluster import router
from engine_ext.wire.vllm_compat import GracefulHTTPError
from replicas.registry import InProcessRegistry, RegistryError, Replica
from tests.support.context import make_context

REPLICA = Replica("a" * 12, "a", "http://a:8000", ("demo",), "", load=2, held_tokens=64, capacity_tokens=1024)


class Registry(InProcessRegistry):
    num_invalid = 3
    is_lost = False

    async def replicas(self):
        if self.is_lost:
            raise RegistryError("lost")
        return await super().replicas()


async def ask(registry=None):
    app = FastAPI()
    app.include_router(router)
    app.state.tessera = make_context(registry=registry)
    async with AsyncClient(transport=ASGITransport(app), base_url="http://server") as client:
        return (await client.get("/v1/cluster")).json()


async def test_names_the_replicas():
    registry = Registry()
    await registry.beat(REPLICA)
    assert await ask(registry) == {
        "registry": {"up": True, "invalid_entries": 3},
        "replicas": [REPLICA.to_dict()],
    }


async def test_while_the_registry_is_lost_none_is_named():
    registry = Registry()
    registry.is_lost = True
    assert await ask(registry) == {"registry": {"up": False, "invalid_entries": 3}, "replicas": []}


async def test_without_a_registry():
    with pytest.raises(GracefulHTTPError, match="this server has no registry") as raised:
        await ask()
    assert raised.value.http_status == 404
