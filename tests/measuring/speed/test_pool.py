# SPDX-License-Identifier: Apache-2.0
"""A server's description of its pool."""

import pytest

from measuring.kit.client import ServerError
from measuring.speed.query import Query
from measuring.speed.servers import Pool, Servers


@pytest.fixture
async def servers(fakes, tmp_path):
    async with Servers("model", (), tmp_path) as servers:
        yield servers


async def test_sizes(servers, fakes):
    fakes.state = {"pages_total": 50, "page_tokens": 16, "page_bytes": 640}
    server = await servers.get("tessera")
    assert await server.pool() == Pool(pages=50, free=50, page_tokens=16, page_bytes=640)
    await server.ingest(Query("s", ("a" * 30, "b" * 31), "", 1))
    pool = await server.pool()
    assert pool.free == 50 - 2 - 3
    assert (pool.pages_for(32), pool.pages_for(33)) == (2, 3)


async def test_a_cache_that_is_off_is_an_error(servers, fakes):
    fakes.state = {"off": "no layout explains it"}
    with pytest.raises(ServerError, match=r"tessera \(its log is .*\): the chunk cache is off: no layout explains it"):
        await (await servers.get("tessera")).pool()


async def test_a_server_without_statistics_is_named(servers):
    server = await servers.get("stock")
    with pytest.raises(ServerError, match=r"stock \(its log .*\) failed: /v1/elsewhere: HTTP 404"):
        await server.get("/v1/elsewhere")
