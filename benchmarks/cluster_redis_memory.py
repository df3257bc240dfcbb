# SPDX-License-Identifier: Apache-2.0
"""What the registry costs Redis: bytes per claim, commands and round trips per call, and how long a look-up takes.

    python -m benchmarks.cluster_redis_memory

Claims are published by :class:`replicas.redis_registry.RedisRegistry` to a ``redis-server`` started for it on the loopback
interface; bytes are the growth of ``used_memory``. ``--url`` measures a server that is there already: it must be empty.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from redis import Redis
from redis.asyncio.client import Pipeline
from redis.exceptions import RedisError
from rich.console import Console
from rich.table import Table

from replicas.redis_registry import RedisRegistry
from replicas.registry import DocumentKey, Holding, Replica, Tier
from tools.progress import say
from tools.redis_process import NoRedisError, local_redis

HOLDERS = (1, 2, 8)
"""Replicas that hold each document."""
BYTES_AT_MOST = 200
LOOKED_UP = 10
_TIMEOUT_S = 10.0
_MOST_LOOK_UPS, _MOST_DOCUMENTS = 2000, 10_000
_HOLDING = Holding(Tier.DEVICE, 512, 512 * 131_072)
_OURS = ("info", "config|resetstat", "dbsize", "flushdb")
"""Commands of this program itself."""


class MeasurementError(Exception):
    """There is nothing to measure; the message says why."""


async def measure(url: str, pairs: int) -> dict[str, Any]:
    """Everything; leaves the server empty."""
    redis = Redis.from_url(url)
    if redis.dbsize():
        raise MeasurementError(f"{url} is not empty")
    memory = []
    for holders in HOLDERS:
        memory.append(await bytes_per_pair(redis, url, pairs, holders))
        redis.flushdb()
    calls = await commands_per_call(redis, url)
    times = await look_up_times(redis, url, min(pairs // HOLDERS[-1], _MOST_DOCUMENTS))
    return {"redis": redis.info("server")["redis_version"], "memory": memory, "calls": calls, "look_up_ms": times}


async def bytes_per_pair(redis: Redis, url: str, pairs: int, holders: int) -> dict[str, Any]:
    """Memory of ``pairs`` claims, when each document has so many holders."""
    before = redis.info("memory")["used_memory"]
    await _publish(url, _keys(pairs // holders), holders)
    grown = redis.info("memory")["used_memory"] - before
    documents = redis.dbsize()
    return {
        "holders": holders,
        "documents": documents,
        "pairs": documents * holders,
        "bytes": grown,
        "bytes_per_pair": grown / (documents * holders),
    }


async def commands_per_call(redis: Redis, url: str) -> dict[str, dict[str, Any]]:
    """What each method asks of Redis, once it is connected."""
    keys, replica = _keys(LOOKED_UP), Replica(_id(0), "replica-0", "http://127.0.0.1:8000", ("model",), "fingerprint")
    registry = RedisRegistry(url, timeout_s=_TIMEOUT_S)
    await registry.beat(replica)
    calls: dict[str, Callable[[], Awaitable[Any]]] = {
        "beat": partial(registry.beat, replica),
        "replicas": registry.replicas,
        "publish: a claim": partial(registry.publish, replica.id, {keys[0]: _HOLDING}),
        "publish: a claim less": partial(registry.publish, replica.id, {keys[0]: None}),
        f"claims of {LOOKED_UP} documents": partial(registry.claims, keys),
    }
    counted = {name: await _counted(redis, call) for name, call in calls.items()}
    await registry.close()
    redis.flushdb()
    return counted


async def look_up_times(redis: Redis, url: str, documents: int) -> dict[str, float]:
    """Milliseconds for the claims of some documents, each with the most holders, one look-up after the other."""
    keys, rng = _keys(documents), random.Random(0)
    await _publish(url, keys, HOLDERS[-1])
    registry, times = RedisRegistry(url, timeout_s=_TIMEOUT_S), []
    for _ in range(min(_MOST_LOOK_UPS, documents)):
        wanted = rng.sample(keys, LOOKED_UP)
        started = time.perf_counter()
        found = await registry.claims(wanted)
        times.append((time.perf_counter() - started) * 1e3)
        assert all(len(claims) == HOLDERS[-1] for claims in found)
    await registry.close()
    redis.flushdb()
    cuts = statistics.quantiles(times[1:], n=100, method="inclusive")  # the first connects
    return {"p50": cuts[49], "p99": cuts[98]}


async def _publish(url: str, keys: Sequence[DocumentKey], holders: int) -> None:
    registry = RedisRegistry(url, timeout_s=_TIMEOUT_S)
    for number in range(holders):
        await registry.publish(_id(number), dict.fromkeys(keys, _HOLDING))
    await registry.close()


async def _counted(redis: Redis, call: Callable[[], Awaitable[Any]]) -> dict[str, Any]:
    redis.config_resetstat()
    with mock.patch.object(Pipeline, "execute", autospec=True, side_effect=Pipeline.execute) as execute:
        await call()
    stats = redis.info("commandstats")
    commands = {name.removeprefix("cmdstat_"): each["calls"] for name, each in stats.items()}
    return {
        "commands": {name: calls for name, calls in sorted(commands.items()) if name not in _OURS},
        "round_trips": execute.call_count,
    }


def _keys(number: int) -> list[DocumentKey]:
    rng = random.Random(number)
    return [DocumentKey(rng.randbytes(16)) for _ in range(number)]


def _id(number: int) -> str:
    return random.Random(f"replica {number}").randbytes(6).hex()


def tables(result: dict[str, Any]) -> Iterator[Table]:
    """Memory, and calls."""
    memory = Table("holders of a document", title=f"Redis {result['redis']}: memory", title_justify="left")
    for column in ("documents", "claims", "MB", "bytes per claim", ""):
        memory.add_column(column, justify="right")
    for row in result["memory"]:
        per_pair = row["bytes_per_pair"]
        verdict = "ok" if per_pair <= BYTES_AT_MOST else f"MISSED: at most {BYTES_AT_MOST}"
        numbers = (row["holders"], row["documents"], row["pairs"], f"{row['bytes'] / 1e6:.1f}", f"{per_pair:.1f}")
        memory.add_row(*map(str, numbers), verdict)
    yield memory
    calls = Table("call", "commands", title="Calls", title_justify="left")
    calls.add_column("round trips", justify="right")
    for name, asked in result["calls"].items():
        listed = ", ".join(f"{times} {command}" for command, times in asked["commands"].items())
        calls.add_row(name, listed, str(asked["round_trips"]))
    yield calls


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the numbers; exit code 1 if a claim takes more than it may."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=200_000, help="claims to publish (default: %(default)s)")
    parser.add_argument("--url", help="of an empty Redis or Valkey (default: one is started)")
    parser.add_argument("--json", type=Path, help="file for the numbers")
    args = parser.parse_args(argv)
    if args.pairs < LOOKED_UP * HOLDERS[-1]:
        parser.error(f"--pairs must be at least {LOOKED_UP * HOLDERS[-1]}")
    try:
        if args.url:
            result = asyncio.run(measure(args.url, args.pairs))
        else:
            with local_redis() as url:
                result = asyncio.run(measure(url, args.pairs))
    except (MeasurementError, NoRedisError, RedisError) as error:
        say(str(error))
        return 1
    console = Console()
    for each in tables(result):
        console.print(each)
    times = result["look_up_ms"]
    print(f"look-up of {LOOKED_UP} documents with {HOLDERS[-1]} holders each: {times['p50']:.2f} ms, ", end="")
    print(f"99th percentile {times['p99']:.2f} ms")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return int(any(row["bytes_per_pair"] > BYTES_AT_MOST for row in result["memory"]))


if __name__ == "__main__":
    sys.exit(main())
