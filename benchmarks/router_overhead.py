# SPDX-License-Identifier: Apache-2.0
"""What the router adds to the time to first token, with many streams at once, in three processes beside this one.

    python -m benchmarks.router_overhead

A stand-in for a replica streams at the pace of an engine; half of the streams go straight to it, the others through
`tessera route`, which looks their documents up in a real Redis. So the router's time is measured, and no engine's.
"""

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import aiohttp
import uvicorn
from rich.console import Console
from rich.progress import Progress
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from app.documents.request_documents import wanted_documents
from benchmarks.statistics import median, p95
from benchmarks.texts import Texts
from replicas.redis_registry import RedisRegistry
from replicas.registry import Holding, Replica, Tier
from tools.progress import say
from tools.redis_process import NoRedisError, local_redis
from tools.server_process import ServerProcess, free_port

ADDED_AT_MOST_S = 0.005
_PATH = "/v1/rag/chat"
_FIRST_TOKEN_S, _TOKEN_S, _TOKENS = 0.2, 0.05, 40
_DOCUMENTS, _DOCUMENT_TOKENS, _REQUESTS = 8, 500, 20
_REPLICA = Replica("00" * 6, "stand-in", "", ("m",), "f")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints; 1 if the router adds more than it may, 2 without a Redis."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=50, help="at once (default: 50)")
    parser.add_argument("--seconds", type=float, default=30, help="of measuring (default: 30)")
    args = parser.parse_args(arguments)
    try:
        with tempfile.TemporaryDirectory() as folder, local_redis() as redis, _stand_in() as url:
            router = ServerProcess(Path(folder) / "router.log", "--registry", redis, serve=("app.cli", "route"))
            try:
                times = asyncio.run(_measure(redis, url, router, args.streams, args.seconds))
            finally:
                router.stop()
    except NoRedisError as error:
        say(str(error))
        return 2
    added = median(times["routed"]) - median(times["direct"])
    for name, seconds in times.items():
        say(f"{name}: median {median(seconds) * 1e3:.1f} ms, p95 {p95(seconds) * 1e3:.1f} ms of {len(seconds)} streams")
    verdict = "holds" if added <= ADDED_AT_MOST_S else "does not hold"
    say(f"added to the median at {args.streams} streams: {added * 1e3:.1f} ms, at most 5: {verdict}")
    print(json.dumps({"streams": args.streams, "added_ms": round(added * 1e3, 3)}))
    return int(added > ADDED_AT_MOST_S)


async def _measure(redis: str, url: str, router: ServerProcess, streams: int, seconds: float) -> dict[str, list[float]]:
    texts = Texts("router")
    documents = [texts.chunks(_DOCUMENTS, _DOCUMENT_TOKENS) for _ in range(_REQUESTS)]
    bodies = [{"chunks": chunks, "question": "?", "stream": True} for chunks in documents]
    registry = RedisRegistry(redis, lease_s=600)
    await registry.beat(Replica.from_dict({**_REPLICA.to_dict(), "url": url}))
    # A second replica, never better, so that there is a choice to make.
    other = {"id": "01" * 6, "name": "other", "url": url.replace("127.0.0.1", "localhost"), "load": 999}
    await registry.beat(Replica.from_dict({**_REPLICA.to_dict(), **other}))
    wanted = [document for body in bodies for document in wanted_documents(_PATH, {**body})]
    await registry.publish(_REPLICA.id, {document.key: Holding(Tier.DEVICE, 500, 1) for document in wanted})
    await registry.close()
    await asyncio.to_thread(router.wait_ready)
    times: dict[str, list[float]] = {"direct": [], "routed": []}
    over = time.monotonic() + seconds
    addresses = {"direct": url, "routed": router.url}

    async def client(seed: int, session: aiohttp.ClientSession) -> None:
        randomly = random.Random(seed)
        await asyncio.sleep(randomly.random() * 2)  # or all would begin at once, again and again
        while time.monotonic() < over:
            for name in randomly.sample(list(times), 2):
                times[name].append(await _time_to_first_token(session, addresses[name], randomly.choice(bodies)))

    connector = aiohttp.TCPConnector(limit=0)
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("streams", total=seconds)
        async with aiohttp.ClientSession(connector=connector) as session:
            clients = [asyncio.create_task(client(number, session)) for number in range(streams)]
            while (pending := [each for each in clients if not each.done()]) != []:
                progress.update(task, completed=seconds - max(0.0, over - time.monotonic()))
                await asyncio.wait(pending, timeout=0.5)
            for each in clients:
                each.result()
    return times


async def _time_to_first_token(session: aiohttp.ClientSession, url: str, body: dict[str, object]) -> float:
    started = time.perf_counter()
    async with session.post(url + _PATH, json=body) as response:
        response.raise_for_status()
        await response.content.readany()
        seconds = time.perf_counter() - started
        await response.read()
    return seconds


@contextlib.contextmanager
def _stand_in() -> Iterator[str]:
    port = free_port()
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(port,))
    process.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.join()


def _serve(port: int) -> None:
    async def chat(request: Request) -> Response:
        await request.body()

        async def tokens() -> AsyncIterator[bytes]:
            await asyncio.sleep(_FIRST_TOKEN_S)
            for number in range(_TOKENS):
                yield b'data: {"choices":[{"delta":{"content":"%d"}}]}\n\n' % number
                await asyncio.sleep(_TOKEN_S)

        return StreamingResponse(tokens(), media_type="text/event-stream")

    async def health(_: Request) -> Response:
        return JSONResponse({})

    app = Starlette(routes=[Route(_PATH, chat, methods=["POST"]), Route("/health", health)])
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="critical", timeout_graceful_shutdown=1)


if __name__ == "__main__":
    sys.exit(main())
