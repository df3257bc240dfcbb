# SPDX-License-Identifier: Apache-2.0
"""``PATCH /v1/rag/chunks/{key}``; tests/engine covers the other endpoints."""

from types import SimpleNamespace

import pytest
from fastapi import FastAPI
from httpx import ASGITransport, AsyncClient

from app.errors import answer_errors
from app.routes.chunks import router
from tests.app.helpers import cache_with
from tests.cache.helpers import fill, make_manager


@pytest.fixture
def manager():
    """Ten pages, nine of them pinnable: one for the system segment, four for each of two chunks."""
    manager = make_manager(10)
    fill(manager, range(100, 116), range(200, 216))
    return manager


@pytest.fixture
def keys(manager):
    return [str(entry.key) for entry in manager.index if not entry.is_system]


async def patch(manager, key, body):
    app = FastAPI()
    app.include_router(router)
    answer_errors(app)
    app.state.engine_client = SimpleNamespace(cache=cache_with(manager))
    async with AsyncClient(transport=ASGITransport(app), base_url="http://server") as client:
        return await client.patch(f"/v1/rag/chunks/{key}", json=body)


async def test_pins_and_unpins(manager, keys):
    for pinned in (True, True, False, False):
        answer = await patch(manager, keys[0], {"pinned": pinned})
        assert (answer.status_code, answer.json()["key"], answer.json()["pinned"]) == (200, keys[0], pinned)
        assert manager.occupancy()["pages_pinned"] == (4 if pinned else 0)
        manager.check_integrity()


async def test_a_pinned_chunk_is_not_evicted(manager, keys):
    await patch(manager, keys[0], {"pinned": True})
    fill(manager, range(300, 316))
    assert [key for key in keys if key in {str(entry.key) for entry in manager.index}] == keys[:1]


async def test_the_time_to_live_stays(manager, keys):
    entry = next(entry for entry in manager.index if str(entry.key) == keys[0])
    manager.retain(entry, pinned=False, expires_at=9e9)
    assert (await patch(manager, keys[0], {"pinned": True})).json()["expires_at"] == 9e9
    assert (await patch(manager, keys[0], {"pinned": False})).json()["expires_at"] == 9e9


async def test_what_can_not_be_pinned_says_so():
    manager = make_manager(4)  # three of them pinnable: the chunk's
    fill(manager, range(100, 112))
    (system,) = (str(entry.key) for entry in manager.index if entry.is_system)
    (key,) = (str(entry.key) for entry in manager.index if not entry.is_system)
    await patch(manager, key, {"pinned": True})
    answer = await patch(manager, system, {"pinned": True})
    assert answer.status_code == 409
    assert "pinning 1 more pages would exceed 3 of 4 pages; 3 are pinned" in answer.json()["error"]["message"]


async def test_unknown_keys(manager):
    answer = await patch(manager, "00ff", {"pinned": True})
    assert (answer.status_code, answer.json()["error"]["message"]) == (404, "no cached segment has the key 00ff")
    answer = await patch(manager, "xyz", {"pinned": True})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "key")
    assert error["message"].startswith("a key is hexadecimal")


@pytest.mark.parametrize(
    "body", [{}, {"pinned": "yes"}, {"pinned": 1}, {"pinned": None}, {"pinned": True, "ttl_s": 5}, []]
)
async def test_bad_bodies(manager, keys, body):
    assert (await patch(manager, keys[0], body)).status_code == 422
