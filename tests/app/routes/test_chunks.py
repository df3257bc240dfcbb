# SPDX-License-Identifier: Apache-2.0
"""``/v1/rag/chunks``: pins, unknown keys and bad filters; tests/engine has what is computed."""

from types import SimpleNamespace

import pytest

from app.routes.chunks import router
from tests.app.helpers import cache_with
from tests.cache.helpers import fill, make_manager
from tests.support.context import client_with


@pytest.fixture
def manager():
    """Ten pages, nine of them pinnable: one for the system segment, four for each of two chunks."""
    manager = make_manager(10)
    fill(manager, range(100, 116), range(200, 216))
    return manager


def keys(manager, *, is_system=False):
    return [str(entry.key) for entry in manager.index if entry.is_system == is_system]


async def ask(manager, method, path, **given):
    async with client_with(router, engine_client=SimpleNamespace(cache=cache_with(manager))) as client:
        return await client.request(method, f"/v1/rag/chunks{path}", **given)


async def patch(manager, key, body):
    return await ask(manager, "PATCH", f"/{key}", json=body)


async def test_a_chunk_is_pinned_and_unpinned_and_its_time_to_live_stays(manager):
    key, other = keys(manager)
    manager.retain(next(entry for entry in manager.index if str(entry.key) == key), pinned=False, expires_at=9e9)
    for pinned in (True, True, False, False, True):
        answer = await patch(manager, key, {"pinned": pinned})
        shown = answer.json()
        assert (answer.status_code, shown["key"], shown["pinned"], shown["expires_at"]) == (200, key, pinned, 9e9)
        assert manager.occupancy()["pages_pinned"] == (4 if pinned else 0)
        manager.check_integrity()
    fill(manager, range(300, 316))  # for which the other one makes room
    assert key in keys(manager)
    assert other not in keys(manager)


async def test_what_can_not_be_pinned_says_so():
    manager = make_manager(4)  # three of them pinnable: the chunk's
    fill(manager, range(100, 112))
    await patch(manager, *keys(manager), {"pinned": True})
    answer = await patch(manager, *keys(manager, is_system=True), {"pinned": True})
    assert answer.status_code == 409
    assert "pinning 1 more pages would exceed 3 of 4 pages; 3 are pinned" in answer.json()["error"]["message"]


@pytest.mark.parametrize("method", ["GET", "DELETE", "PATCH"])
@pytest.mark.parametrize(
    ("key", "status", "message"),
    [
        ("00ff", 404, "no cached segment has the key 00ff"),
        ("f" * 32, 404, "no cached segment"),
        ("%20", 404, "no cached segment"),
        ("xyz", 400, "a key is hexadecimal"),
        ("fff", 400, "a key is hexadecimal"),
        ("00ff,00ff", 400, "a key is hexadecimal"),
        ("%D9%A3%D9%A3", 400, "a key is hexadecimal"),
        ("ff" * 20_000, 404, "no cached segment"),
    ],
)
async def test_keys_that_name_nothing(manager, method, key, status, message):
    answer = await ask(manager, method, f"/{key}", json={"pinned": True} if method == "PATCH" else None)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, "key" if status == 400 else None)
    assert error["message"].startswith(message)


@pytest.mark.parametrize("body", [{"keys": ["00ff"] * 100_000}, {"ids": 5}, [[]], "x", None])
async def test_a_deletion_takes_nothing_from_its_body(manager, body):
    """It drops the segment of its path, and no other."""
    assert (await ask(manager, "DELETE", "/00ff", json=body)).status_code == 404
    assert (await ask(manager, "DELETE", "", json=body)).status_code == 405
    assert len(keys(manager)) == 2


@pytest.mark.parametrize(
    ("name", "value"),
    [("limit", 0), ("limit", 1001), ("limit", "x"), ("state", "x"), ("kind", "x"), ("pinned", "x"), ("cursor", "x")],
)
async def test_bad_filters_are_named(manager, name, value):
    answer = await ask(manager, "GET", "", params={name: value})
    if name == "cursor":
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
    else:
        assert (answer.status_code, answer.json()["detail"][0]["loc"]) == (422, ["query", name])


@pytest.mark.parametrize("body", [{}, {"pinned": "yes"}, {"pinned": 1}, {"pinned": True, "ttl_s": 5}, []])
async def test_bad_bodies(manager, body):
    assert (await patch(manager, keys(manager)[0], body)).status_code == 422
