#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measure times to first token with all chunks in a tier, as ratios to all in the pool.

    .venv/bin/python scripts/measure_tier_speed.py [MODEL]

Eight chunks of 512 tokens, in host memory, a directory in the page cache, and an object store that answers each request
20 ms late. A server for each tier; its rounds alternate between pool and tier.
"""

import asyncio
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import boto3
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

from measuring.kit.client import Client
from measuring.kit.texts import Texts
from tools.random_model import build_preset
from tools.server_process import ServerProcess

ROUNDS, CHUNKS, TOKENS, DELAY_S = 8, 8, 512, 0.02
FLAGS: Final = ("--dtype", "float32", "--max-model-len", "8192", "--chunk-cache-memory", "1GiB")
CREDENTIALS: Final = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1"}


@contextmanager
def slow_store() -> Iterator[str]:
    """The address of a local S3 server with a bucket."""
    app = DomainDispatcherApplication(create_backend_app)
    late = [0.0]

    def answer(environ: dict[str, Any], start_response: Any) -> Any:
        time.sleep(late[0])
        return app(environ, start_response)

    server = make_server("127.0.0.1", 0, answer, threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.port}"
    os.environ |= CREDENTIALS
    boto3.client("s3", endpoint_url=url).create_bucket(Bucket="bucket")
    late[0] = DELAY_S
    try:
        yield url
    finally:
        server.shutdown()


async def rounds(url: str) -> dict[str, list[float]]:
    """Seconds to the first token, with all chunks in the pool and with none."""
    found: dict[str, list[float]] = {"pool": [], "tier": []}
    texts = Texts("tiers")
    chunks = texts.chunks(CHUNKS, TOKENS)
    async with Client(url) as client:
        for number in range(-1, ROUNDS):
            for way in found:
                if way == "tier":
                    while (await client.get("/v1/cache/stats"))["occupancy"]["archive_waiting"]:
                        await asyncio.sleep(0.1)
                    slept = await client.post("/v1/cache/sleep", {"idle_s": 0})
                    assert slept["segments"] >= CHUNKS, slept
                # Another order each time: vLLM's own blocks are not shared.
                body = {"chunks": texts.shuffled(chunks), "question": texts.text(40), "max_tokens": 4, "stream": True}
                answer = await client.stream("/v1/rag/chat", body)
                statuses = {chunk["status"] for chunk in answer.cache["chunks"]}
                if number >= 0:
                    assert statuses == {"hit" if way == "pool" else "loaded"}, answer.cache
                    found[way].append(answer.ttft_s or 0.0)
    return found


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else str(build_preset("bench-100m"))
    with tempfile.TemporaryDirectory() as folder, slow_store() as store:
        tiers = {
            "host memory": "host://?size=1GiB",
            "directory": f"file://{folder}/tier?size=1GiB",
            "object store": f"s3://bucket/x?size=1GiB&endpoint={store}",
        }
        for number, (name, tier) in enumerate(tiers.items()):
            server = ServerProcess(
                Path(folder) / f"{number}.log",
                model,
                *FLAGS,
                "--chunk-cache-tiers",
                tier,
                "--chunk-cache-tier-timeout",
                "9",
            )
            try:
                found = asyncio.run(rounds(server.wait_ready().url))
            finally:
                server.stop()
            pool, loaded = (statistics.median(found[way]) for way in ("pool", "tier"))
            print(
                f"{name}: {loaded / pool:.2f} ({1e3 * loaded:.0f} ms, {1e3 * pool:.0f} in the pool, "
                f"{1e3 * (loaded - pool):+.0f} ms)",
                flush=True,
            )


if __name__ == "__main__":
    main()
