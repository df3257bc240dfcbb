# SPDX-License-Identifier: Apache-2.0
"""What a server says of its pool."""

import pytest

from measuring.speed.pool import Pool, pool_of
from measuring.speed.rag import BenchmarkError, Query
from measuring.speed.servers import Servers


@pytest.fixture
async def servers(fakes, tmp_path):
    async with Servers("model", (), tmp_path) as servers:
        yield servers


async def test_sizes(servers, fakes):
    fakes.state = {"pages_total": 50, "page_tokens": 16, "page_bytes": 640}
    server = await servers.get("tessera")
    assert await pool_of(server) == Pool(pages=50, free=50, page_tokens=16, page_bytes=640)
    await server.ingest(Query("s", ("a" * 30, "b" * 31), "", 1))
    pool = await pool_of(server)
    assert pool.free == 50 - 2 - 3
    assert (pool.pages_for(32), pool.pages_for(33)) == (2, 3)


async def test_a_cache_that_is_off_is_an_error(servers, fakes):
    fakes.state = {"off": "no layout explains it"}
    with pytest.raises(BenchmarkError, match="tessera: the chunk cache is off: no layout explains it"):
        await pool_of(await servers.get("tessera"))


async def test_a_server_without_statistics_is_named(servers):
    server = await servers.get("stock")
    server.http.base_url = f"{server.process.url}/elsewhere"
    with pytest.raises(BenchmarkError, match="stock: /v1/cache/stats: 404"):
        await pool_of(server)
