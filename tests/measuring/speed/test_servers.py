# SPDX-License-Identifier: Apache-2.0
"""Servers as processes: started once, stopped whatever happens, and named when they fail; their pools."""

import pytest
from starlette.responses import PlainTextResponse

from measuring.kit.client import ServerError
from measuring.speed.query import Query
from measuring.speed.servers import Pool, Server, Servers
from tests.measuring.fake_server import CHAT, CHUNKS
from tests.measuring.helpers import is_gone

QUERY = Query("system", ("one",), "question", 4)


@pytest.mark.usefixtures("small_processes")
async def test_servers_are_started_once_and_stopped_at_the_end(tmp_path):
    async with Servers("model", ("--dtype", "float32"), tmp_path) as servers:
        stock, tessera = await servers.get("stock"), await servers.get("quarter", "--chunk-cache-memory", "4")
        assert await servers.get("stock") is stock
        assert (stock.is_stock, tessera.is_stock) == (True, False)
        assert (await stock.ask(QUERY)).text == (await tessera.ask(QUERY)).text
        assert await stock.vllm_version() == "0.32.0"
        assert not is_gone(tmp_path / "stock.log")
    assert is_gone(tmp_path / "stock.log")
    assert is_gone(tmp_path / "quarter.log")
    assert "model model, flags ['--dtype', 'float32', '--host'" in (tmp_path / "stock.log").read_text()
    assert "'float32', '--chunk-cache-memory', '4', '--host'" in (tmp_path / "quarter.log").read_text()


@pytest.mark.usefixtures("small_processes")
async def test_a_server_that_does_not_start_or_dies_is_named_with_its_log(tmp_path):
    async with Servers("model", ("--die",), tmp_path) as servers:
        with pytest.raises(ServerError) as error:
            await servers.get("stock")
    assert str(error.value) == f"stock didn't start: error: out of luck; its log is {tmp_path / 'stock.log'}"
    async with Servers("model", ("--fail",), tmp_path) as servers:
        server = await servers.get("tessera")
        with pytest.raises(ServerError) as error:
            await server.ask(QUERY)
        assert str(error.value).startswith(f"lost tessera (its log is {tmp_path / 'tessera.log'}): ")
        for call in (server.ingest(QUERY), server.clear("n"), server.vllm_version(), server.token_logprobs(QUERY)):
            with pytest.raises(ServerError, match=r"tessera \(its log is "):
                await call


async def test_closing_stops_one_server_and_it_may_start_again(fakes, tmp_path):
    async with Servers("model", (), tmp_path) as servers:
        first = await servers.get("quarter", "--a")
        await servers.get("stock")
        await servers.close("quarter")
        await servers.close("never")
        assert fakes.running == {"stock"}
        assert await servers.get("quarter", "--b") is not first
        assert fakes.flags["quarter"] == ("--b",)
    assert fakes.running == set()


async def test_all_servers_are_stopped_after_an_error_and_even_if_one_cannot_be(monkeypatch, fakes, tmp_path):
    close, stuck = Server.__aexit__, [OSError("stuck")]

    async def closing(self, *error):
        await close(self, *error)
        if stuck:
            raise stuck.pop()

    async def run():
        async with Servers("model", (), tmp_path) as servers:
            await servers.get("stock")
            await servers.get("tessera")
            raise ZeroDivisionError

    monkeypatch.setattr(Server, "__aexit__", closing)
    with pytest.raises(OSError, match="stuck"):
        await run()
    assert fakes.running == set()


async def test_ordinary_chat_goes_to_the_same_endpoint_of_both(fakes, tmp_path):
    async with Servers("model", (), tmp_path) as servers:
        for name in ("stock", "tessera"):
            await (await servers.get(name)).ask(Query("", (), "question", 4))
    assert fakes.servers["stock"].requests == fakes.servers["tessera"].requests
    assert [path for path, _ in fakes.servers["stock"].requests] == [CHAT]


async def test_what_could_not_be_computed_ahead_is_an_error(fakes, tmp_path):
    fakes.state = {"fixed": {CHUNKS: PlainTextResponse('{"summary": {"failed": 1}}\n')}}
    async with Servers("model", (), tmp_path) as servers:
        with pytest.raises(ServerError, match=r"chunks could not be computed ahead: .*failed"):
            await (await servers.get("tessera")).ingest(QUERY)


async def test_a_pool(fakes, tmp_path):
    fakes.state = {"pages_total": 50, "page_tokens": 16, "page_bytes": 640}
    async with Servers("model", (), tmp_path) as servers:
        server = await servers.get("tessera")
        assert await server.pool() == Pool(pages=50, free=50, page_tokens=16, page_bytes=640)
        await server.ingest(Query("s", ("a" * 30, "b" * 31), "", 1))
        pool = await server.pool()
        assert pool.free == 50 - 2 - 3
        assert (pool.pages_for(32), pool.pages_for(33)) == (2, 3)
        fakes.servers["tessera"].off = "no layout explains it"
        with pytest.raises(ServerError, match=r"tessera \(its log is .*\): the chunk cache is off: no layout explains"):
            await server.pool()
