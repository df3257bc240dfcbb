# SPDX-License-Identifier: Apache-2.0
"""Checks that this machine has what the flags ask for."""

import argparse
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

import psutil
from pydantic import ByteSize
from redis import Redis
from redis.exceptions import RedisError
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform

from app.commands.doctor.finding import Finding
from app.settings import Settings
from cache.tiers.config import make_tier, size_of
from cache.tiers.directory import DirectoryTier
from cache.tiers.signed import TierKey
from cache.tiers.tier import TierConfigError
from engine_ext.start.connectors import ADDRESSING, Addressing, other_connectors
from engine_ext.start.memory import default_pool_bytes, device_bytes, set_cpu_defaults
from machine.processor import cpu_flags, cpu_model, instruction_sets
from machine.progress import first_line
from machine.server_process import is_free

_TIER_FIXES: Final = {
    "file": "make it a directory that this user may write to",
    "mooncake": "start Mooncake's master there, and pip install mooncake-transfer-engine",
}
_OBJECT_STORE_FIX: Final = "check bucket, endpoint and credentials (AWS_ACCESS_KEY_ID …)"


def findings(args: argparse.Namespace, settings: Settings) -> Iterator[Finding]:
    """Yields findings without changing anything on the machine."""
    checks: tuple[Callable[[argparse.Namespace, Settings], Iterator[Finding]], ...] = (
        _device,
        _memory,
        _port,
        _registry,
        _tiers,
        _connectors,
    )
    for check in checks:
        try:
            yield from check(args, settings)
        except Exception as error:  # some platforms lack a query; the engine's start decides
            yield Finding("warn", f"could not check the {check.__name__.strip('_')}: {first_line(error)}")


def _device(_: argparse.Namespace, __: Settings) -> Iterator[Finding]:
    kind = str(current_platform.device_type)
    if not kind:
        yield Finding("FAIL", "vLLM finds no device for its build", "check the driver, or install another build")
    elif kind == "cpu":
        instructions = ", ".join(instruction_sets(cpu_flags())) or "no AVX"
        cores = len(os.sched_getaffinity(0))
        yield Finding("ok", f"CPU: {cpu_model()}, cores: {cores}, instructions: {instructions}")
    elif kind == "cuda" and find_spec("triton") is None:
        yield Finding("FAIL", "Triton, which moves keys and values on GPUs, is not installed", "pip install triton")
    else:
        yield Finding("ok", f"{kind}: {current_platform.get_device_name()}")


def _memory(args: argparse.Namespace, settings: Settings) -> Iterator[Finding]:
    """Checks that pool, KV cache and host tier fit in memory."""
    set_cpu_defaults(args)
    in_host = sum(size for name, size in map(size_of, settings.tiers()) if name == "host")
    if current_platform.is_cpu():
        in_host += (settings.chunk_cache_memory or default_pool_bytes()) + (args.kv_cache_memory_bytes or 0)
    elif args.kv_cache_memory_bytes is None:
        share = int(device_bytes() * args.gpu_memory_utilization)
        pool = settings.chunk_cache_memory or default_pool_bytes(share)
        yield _room(pool, share, f"that vLLM may take ({args.gpu_memory_utilization:.0%} of the device)")
    yield _room(in_host * args.tensor_parallel_size, psutil.virtual_memory().available, "free")


def _room(wanted: int, there: int, where: str) -> Finding:
    text = f"memory: chunks and KV cache need {_size(wanted)} of {_size(there)} {where}"
    if wanted <= there:
        return Finding("ok", text)
    fix = "--chunk-cache-memory, --kv-cache-memory-bytes or --gpu-memory-utilization lower, or a smaller host:// tier"
    return Finding("warn", text, fix)


def _size(num_bytes: int) -> str:
    return ByteSize(num_bytes).human_readable()


def _port(args: argparse.Namespace, _: Settings) -> Iterator[Finding]:
    if not is_free(args.port):
        yield Finding("warn", f"port {args.port} is in use, perhaps by a server of yours", "choose another with --port")


def _registry(_: argparse.Namespace, settings: Settings) -> Iterator[Finding]:
    if settings.registry is None:
        return
    url = urlsplit(settings.registry)
    where = f"registry {url.scheme}://{url.hostname}:{url.port or 6379}"  # without the password
    try:
        with Redis.from_url(settings.registry, socket_timeout=2, socket_connect_timeout=2) as redis:
            redis.ping()
    except ValueError as error:
        yield Finding("FAIL", f"--registry: {first_line(error)}", "as in redis://host:6379/0")
    except (RedisError, OSError) as error:
        fix = "start Redis or Valkey there, or fix the URL; without it the server works alone"
        yield Finding("warn", f"{where}: {first_line(error)}", fix)
    else:
        yield Finding("ok", f"{where} answers")


def _tiers(_: argparse.Namespace, settings: Settings) -> Iterator[Finding]:
    if settings.tier_key is not None:
        try:
            TierKey.read(settings.tier_key)
        except TierConfigError as error:
            yield Finding("FAIL", str(error), "write a secret into it, as head -c 32 /dev/urandom | base64 makes one")
    for url in settings.tiers():
        scheme, max_bytes = urlsplit(url).scheme, size_of(url)[1]
        try:
            yield _directory(url, max_bytes) if scheme == "file" else _other_tier(url, scheme)
        except (TierConfigError, ImportError) as error:
            yield Finding("FAIL", first_line(error), _TIER_FIXES.get(scheme, _OBJECT_STORE_FIX))


def _directory(url: str, max_bytes: int) -> Finding:
    root = Path(unquote(urlsplit(url).path))
    held = DirectoryTier(root, sys.maxsize).num_bytes  # with its own size it would evict files
    there = held + shutil.disk_usage(root).free
    if max_bytes > there:
        fix = f"size={there >> 20}MiB at most"
        return Finding("warn", f"tier {url}: the disk has room for {_size(there)} only", fix)
    return Finding("ok", f"tier {url}: writable, holds {_size(held)}")


def _other_tier(url: str, scheme: str) -> Finding:
    if scheme != "host":
        make_tier(url).close()
    return Finding("ok", f"tier {url}")


def _connectors(args: argparse.Namespace, _: Settings) -> Iterator[Finding]:
    """Places the connectors that the user asked for; others than these are reasons against the chunk cache."""
    for child in other_connectors(AsyncEngineArgs.from_cli_args(args)):
        name = str(child.get("kv_connector"))
        addressing = ADDRESSING.get(name, Addressing.TOKENS)
        if addressing is not Addressing.TOKENS:
            yield Finding("ok", f"{name} runs beside the chunk cache: it finds KV {addressing}")
