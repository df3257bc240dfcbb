# SPDX-License-Identifier: Apache-2.0
"""Tenants of a cluster: router and replica share a tenants file, and both require keys."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from app.access.tenants import hash_of
from replicas.redis_registry import RedisRegistry
from replicas.registry import Replica
from tests.engine.conftest import COMMON
from tests.engine.server import TesseraServer
from tests.redis_server import RedisServer
from tests.support.routers import ASKED, ROUTE, Router, statuses

pytestmark = pytest.mark.matrix

ROLES = {"acme": '["chat"]', "beta": '["chat"]', "root": '["admin"]'}


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory, model_path: Any) -> Iterator[tuple[Router, TesseraServer]]:
    folder = tmp_path_factory.mktemp("routed")
    tenants = folder / "tenants.toml"
    tenants.write_text("".join(f'[{name}]\nkeys = ["{hash_of(name)}"]\nroles = {ROLES[name]}\n' for name in ROLES))
    with ExitStack() as stack:
        redis = RedisServer(folder)
        stack.callback(redis.stop)
        common = ("--registry", redis.url, "--tenants", str(tenants))
        model = (str(model_path("tiny-llama")), "--dtype", "float32", *COMMON)
        replica = TesseraServer(folder / "replica.log", *model, *common, "--replica-name", "a")
        stack.callback(replica.stop)
        router = Router(folder / "router.log", *common, serve=ROUTE)
        stack.callback(router.stop)
        router.client.headers.update(key_of("root"))
        replica.wait_ready()
        router.wait_ready().wait_for("a")
        asyncio.run(add_another(router, redis.url))
        router.wait_for("a", "b")
        yield router, replica


async def add_another(router: Router, redis: str) -> None:
    """Registers the same replica under a second name, so that the router has a choice."""
    (known,) = router.cluster()["replicas"]
    del known["requests_here"]
    url = known["url"].replace("127.0.0.1", "localhost")
    registry = RedisRegistry(redis, lease_s=600)
    await registry.beat(Replica.from_dict({**known, "id": "01" * 6, "name": "b", "url": url, "load": 999}))
    await registry.close()


def key_of(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {name}"}


def ask(router: Router, name: str, chunks: list[str]) -> tuple[list[str], int]:
    """The chunks' statuses, and the number of held tokens known to the router."""
    response = router.client.post("/v1/rag/chat", json={"chunks": chunks, **ASKED}, headers=key_of(name))
    assert response.status_code == 200, response.text
    held = router.cluster()["decisions"][-1]["held_tokens"]
    time.sleep(0.5)  # claims are published ten times a second
    return statuses(response.json()), held


def test_each_is_led_to_its_own_chunks(started: tuple[Router, TesseraServer], text: Callable[[int], str]) -> None:
    router, _ = started
    chunks = [text(100), text(50)]
    assert ask(router, "acme", chunks) == (["filled"] * 2, 0)
    found, held = ask(router, "acme", chunks)
    assert found == ["hit"] * 2
    assert held > 0
    assert ask(router, "beta", chunks) == (["filled"] * 2, 0)


def test_both_ask_for_keys(started: tuple[Router, TesseraServer]) -> None:
    body = {"chunks": ["a"], **ASKED}
    for server in started:
        for headers, status in (({"authorization": ""}, 401), (key_of("nobody"), 401), (key_of("root"), 403)):
            assert server.client.post("/v1/rag/chat", json=body, headers=headers).status_code == status
        assert server.client.get("/metrics", headers=key_of("acme")).status_code == 403
    router, _ = started
    assert router.client.get("/v1/cluster", headers=key_of("acme")).status_code == 403
