#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measure how long users wait for KV that is not in the pool, as ratios to KV that is.

    .venv/bin/python research/measure_tier_speed.py                  # everything, with a random model
    .venv/bin/python research/measure_tier_speed.py --only objects --model MODEL

Times to first token over eight chunks of 512 tokens, with rounds that alternate between the pool and another place:
host memory, a directory in the page cache, an object store that answers each request 20 ms late, another replica's pool
and host memory. Each question comes to an idle server. Of directory and object store also with a plan that starts the
loads 200 ms ahead of the question. Then, the time per output token of two answers, while 200 chunks load.
"""

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

from aiohttp import web

from app.models.random_model import build_preset
from machine.redis_process import RedisProcess
from machine.server_process import ServerProcess, free_port, is_free
from measuring.kit.client import Client
from measuring.kit.texts import Texts

ROUNDS, CHUNKS, TOKENS, DELAY_S, AHEAD_S, LOADED = 16, 8, 512, 0.02, 0.2, 200
IDLE_S: Final = 1.5
"""Pause before each question: for a second after a step, vLLM's workers keep a core busy with waiting."""
FLAGS: Final = ("--max-model-len", "8192", "--chunk-cache-memory", "4GiB")
NO_OBJECTS: Final = "<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"
CREDENTIALS: Final = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1"}
Start = Callable[..., str]
"""Starts a server; returns its URL."""


@contextmanager
def slow_store(port: int) -> Iterator[str]:
    """The address of a local object store that speaks as much of S3 as tiers need, in a process of its own."""
    process = subprocess.Popen([sys.executable, __file__, "--store", str(port)], stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    os.environ |= CREDENTIALS
    try:
        while is_free(port):
            time.sleep(0.05)
        yield url
    finally:
        process.terminate()


def serve_store(port: int) -> None:
    """Serves objects from files until the process ends; each answer begins late.

    As light as can be, since it shares its cores with the engine: files go from the page cache to the socket.
    """
    with tempfile.TemporaryDirectory() as folder:

        def file_of(request: web.Request) -> Path:
            return Path(folder, request.path.replace("/", "~"))

        async def get(request: web.Request) -> web.StreamResponse:
            await asyncio.sleep(DELAY_S)
            if "list-type" in request.query:
                return web.Response(text=NO_OBJECTS, content_type="application/xml")
            return web.FileResponse(file_of(request)) if file_of(request).exists() else web.Response(status=404)

        async def put(request: web.Request) -> web.Response:
            await asyncio.sleep(DELAY_S)
            file_of(request).write_bytes(await request.read())
            return web.Response(headers={"etag": '"1"'})

        app = web.Application(client_max_size=1 << 30)
        app.add_routes([web.get("/{name:.*}", get), web.put("/{name:.*}", put)])
        web.run_app(app, host="127.0.0.1", port=port, print=None)


class Asked:
    """Questions over the same chunks, always in another order: vLLM's own blocks are not shared."""

    def __init__(self, client: Client, seed: str) -> None:
        self._client = client
        self._texts = Texts(seed)
        self._chunks = self._texts.chunks(CHUNKS, TOKENS)

    async def ask(self, client: Client, status: str, *, is_planned: bool = False) -> float:
        """Seconds to the first token, once the chunks have this status; with a plan some time before."""
        await asyncio.sleep(IDLE_S)
        question = {"chunks": self._texts.shuffled(self._chunks), "question": self._texts.text(40), "max_tokens": 4}
        if is_planned:
            await client.post("/v1/rag/plan", {**question, "prefetch": True})
            await asyncio.sleep(AHEAD_S)
        answer = await client.stream("/v1/rag/chat", {**question, "stream": True})
        statuses = {chunk["status"] for chunk in answer.cache["chunks"]}
        assert not status or statuses == {status}, answer.cache
        return answer.ttft_s or 0.0


async def to_sleep(client: Client) -> None:
    """Leaves all chunks to the tier alone."""
    while (await client.get("/v1/cache/stats"))["occupancy"]["archive_waiting"]:
        await asyncio.sleep(0.1)
    await client.post("/v1/cache/sleep", {"idle_s": 0})


async def from_tier(url: str, *, is_planned: bool) -> dict[str, list[float]]:
    """Seconds to the first token, from the pool, from the tier, and from the tier behind a plan."""
    found: dict[str, list[float]] = {"pool": [], "loaded": [], **({"planned": []} if is_planned else {})}
    async with Client(url) as client:
        asked = Asked(client, "tiers")
        await asked.ask(client, "")
        for number in range(-1, ROUNDS):
            for way, seconds in found.items():
                if way != "pool":
                    await to_sleep(client)
                status = {"pool": "hit", "loaded": "loaded", "planned": ""}[way]
                took = await asked.ask(client, status, is_planned=way == "planned")
                if number >= 0:
                    seconds.append(took)
    return found


async def from_replica(url: str, other: str) -> dict[str, list[float]]:
    """Seconds to the first token, from the pool, and from another replica's pool and host memory."""
    found: dict[str, list[float]] = {"pool": [], "fetched": [], "fetched from host memory": []}
    async with Client(url) as client, Client(other) as holder:
        asked = Asked(client, "replicas")
        await asked.ask(client, "")
        for number in range(-1, ROUNDS):
            for way, seconds in found.items():
                if way != "pool":
                    await asked.ask(holder, "")
                    if way != "fetched":
                        await to_sleep(holder)
                    await client.post("/v1/cache/clear", {})
                    await asyncio.sleep(0.5)
                took = await asked.ask(client, "hit" if way == "pool" else "fetched")
                if number >= 0:
                    seconds.append(took)
    return found


async def beside_loads(url: str) -> dict[str, list[float]]:
    """Seconds per output token of two answers, alone and while chunks load from the tier."""
    found: dict[str, list[float]] = {"alone": [], "beside": []}
    texts = Texts("beside")
    chunks = {"chunks": texts.chunks(LOADED, TOKENS)}

    async def loads(client: Client) -> float:
        started = time.perf_counter()
        statuses = {line["status"] async for line in client.lines("/v1/rag/chunks", chunks) if "status" in line}
        assert statuses == {"loaded"}, statuses
        return time.perf_counter() - started

    async with Client(url) as client:
        async for _ in client.lines("/v1/rag/chunks", chunks):
            pass
        for _ in range(ROUNDS // 2):
            for way, seconds in found.items():
                await to_sleep(client)
                loading = asyncio.create_task(loads(client)) if way == "beside" else None
                body = {
                    "max_tokens": 150,
                    "ignore_eos": True,
                    "stream": True,
                    "stream_options": {"include_usage": True},
                }
                asked = ({**body, "messages": [{"role": "user", "content": texts.text(100)}]} for _ in range(2))
                answers = await asyncio.gather(*(client.stream("/v1/chat/completions", each) for each in asked))
                seconds += [answer.tpot_s for answer in answers]
                if loading is not None:
                    took = await loading
                    print(
                        f"  chunks loaded in {took:.1f} s, answers took {answers[0].total_s:.1f} s",
                        flush=True,
                    )
    return found


def tell(name: str, found: dict[str, list[float]]) -> None:
    """Prints ratios to the first way."""
    (base, first), *others = ((way, statistics.median(seconds)) for way, seconds in found.items())
    told = (f"{way} {median / first:.2f} ({1e3 * (median - first):+.0f} ms)" for way, median in others)
    print(f"{name}: {', '.join(told)}; {base} {1e3 * first:.1f} ms", flush=True)


def replicas(start: Start, folder: Path) -> None:
    """Two replicas, one of which fetches from the other, which has host memory besides."""
    redis = RedisProcess(folder)
    try:
        sharing = ("--registry", redis.url, "--peer-secret", "a-secret-of-replicas")
        told = (("--advertise-url", f"http://127.0.0.1:{port}") for port in (free_port(), free_port()))
        tiers = ((), ("--chunk-cache-tiers", "host://?size=4GiB"))
        urls = [start(*sharing, *a, *b, port=int(a[1].rpartition(":")[2])) for a, b in zip(told, tiers, strict=True)]
        tell("other replica", asyncio.run(from_replica(*urls)))
    finally:
        redis.stop()


def main() -> None:
    """Runs one or all measurements."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="default: a random one of 100 million parameters")
    parser.add_argument("--dtype", default="bfloat16", help="of the model and its KV (default: %(default)s)")
    parser.add_argument("--only", choices=("host", "directory", "objects", "replicas", "beside"))
    parser.add_argument("--store", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.store:
        return serve_store(args.store)
    model = args.model or str(build_preset("bench-100m"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with slow_store(free_port()) as store:
            tiers = {
                "host": "host://?size=4GiB",
                "directory": f"file://{folder}/tier?size=4GiB",
                "objects": f"s3://bucket/x?size=4GiB&endpoint={store}",
            }
            for measured in (args.only,) if args.only else (*tiers, "replicas", "beside"):
                with ExitStack() as stack:

                    def start(*flags: str, stack: ExitStack = stack, **options: Any) -> str:
                        server = ServerProcess(
                            folder / "server.log", model, "--dtype", args.dtype, *FLAGS, *flags, **options
                        )
                        stack.callback(server.stop)
                        return server.wait_ready().url

                    if measured == "replicas":
                        replicas(start, folder)
                    elif measured == "beside":
                        url = start("--chunk-cache-tiers", tiers["directory"])
                        tell("time per output token", asyncio.run(beside_loads(url)))
                    else:
                        url = start("--chunk-cache-tiers", f"{tiers[measured]}&timeout=9")
                        tell(measured, asyncio.run(from_tier(url, is_planned=measured != "host")))
    return None


if __name__ == "__main__":
    main()
