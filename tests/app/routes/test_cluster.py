# SPDX-License-Identifier: Apache-2.0
"""``GET /v1/cluster`` of a replica."""

import pytest

from app.routes.cluster import router
from engine_ext.wire.vllm_compat import GracefulHTTPError
from replicas.registry import RegistryError, Replica
from tests.support.context import client_with, make_context
from tests.support.registries import InProcessRegistry

REPLICA = Replica("a" * 12, "a", "http://a:8000", ("demo",), "", load=2, held_tokens=64, capacity_tokens=1024)


class Registry(InProcessRegistry):
    num_invalid = 3


class LostRegistry(Registry):
    async def replicas(self):
        raise RegistryError("lost")


async def ask(registry=None):
    async with client_with(router, tessera=make_context(registry=registry)) as client:
        return (await client.get("/v1/cluster")).json()


async def test_names_the_replicas_while_there_is_a_registry():
    registry = Registry()
    await registry.beat(REPLICA)
    up, lost = {"up": True, "invalid_entries": 3}, {"up": False, "invalid_entries": 3}
    assert await ask(registry) == {"registry": up, "replicas": [REPLICA.to_dict()]}
    assert await ask(LostRegistry()) == {"registry": lost, "replicas": []}
    with pytest.raises(GracefulHTTPError, match="this server has no registry") as raised:
        await ask()
    assert raised.value.http_status == 404
