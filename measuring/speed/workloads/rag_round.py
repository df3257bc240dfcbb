# SPDX-License-Identifier: Apache-2.0
"""One question over new chunks, asked of every system in turn."""

from dataclasses import replace

from measuring.kit.texts import Texts
from measuring.speed.answers import Asked, check_prompt, check_report, check_same
from measuring.speed.rag import Answer, Query
from measuring.speed.samples import System
from measuring.speed.servers import STOCK, TESSERA, Servers


async def measure(servers: Servers, query: Query, texts: Texts, namespace: str) -> dict[System, Answer]:
    """The answers of stock, of its exact repeat, and of Tessera with the chunks and without them, all checked.

    Chunks are computed ahead of time in another order than the query's. ``namespace`` begins the names of two
    namespaces that are new, and empty again afterwards.
    """
    stock = await _ask_stock(servers, query)
    return {**stock, **await _ask_tessera(servers, query, texts, namespace, stock["stock"])}


async def _ask_stock(servers: Servers, query: Query) -> dict[System, Answer]:
    server = await servers.get(STOCK)
    stock = await server.ask(query)
    repeat = await server.ask(query)
    await check_same(query, Asked(server, stock), Asked(server, repeat))
    await server.settle()
    return {"stock": stock, "exact repeat": repeat}


async def _ask_tessera(
    servers: Servers, query: Query, texts: Texts, namespace: str, stock: Answer
) -> dict[System, Answer]:
    server = await servers.get(TESSERA)
    ahead, fresh = f"{namespace}-ahead", f"{namespace}-fresh"
    await server.ingest(replace(query, chunks=tuple(texts.shuffled(query.chunks))), ahead)
    warm = await server.ask(query, ahead)
    empty = await server.ask(query, fresh)
    check_report(warm, "hit")
    check_report(empty, "filled")
    check_prompt(stock, warm)
    await check_same(query, Asked(server, warm, ahead), Asked(server, empty, fresh))
    for each in (ahead, fresh):
        await server.clear(each)
    await server.settle()
    return {"warm": warm, "empty": empty}
