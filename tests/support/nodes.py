# SPDX-License-Identifier: Apache-2.0
"""Replicas of one process that fetch chunks from one another."""

import asyncio
import json
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace

import httpx
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import SecretStr

from app.access.middleware import AccessMiddleware
from app.cluster.peers import Peers
from app.cluster.prefillers import Prefillers
from app.routes.peer import router
from cache.config import ChunkCacheConfig
from cache.positions.layout import ChunkedPrompt
from cache.segments.holdings import DocumentKey
from cache.tiers.kept import KeptMemory
from engine_ext.chunks.chunk_cache import ChunkCache
from engine_ext.chunks.transfers import TransferError
from engine_ext.client.engine import ChunkEngine
from engine_ext.wire.parts import Division
from engine_ext.wire.vllm_compat import GracefulHTTPError
from engine_ext.wire.worker_messages import Answer
from replicas.peer_file import FINGERPRINT_HEADER, PeerFileError, fetch_file
from replicas.registry import Replica
from replicas.signing import PeerAuth, PeerKey
from tests.cache.helpers import PAGE_TOKENS
from tests.engine_ext.fake_llm import FakeLLM, ask, chunk
from tests.support.context import make_context

SYSTEM = (1, 2, 3, 4, 5)
A, B = chunk(100, 30), chunk(200, 40)
SECRET = "a secret of some length"
LARGEST = 1 << 20
"""Bytes that a file can have."""


def document_key(chunk):
    """The key under which replicas claim a chunk's document."""
    return DocumentKey(chunk.packed[:4] * 4)


class FakeTransfers:
    """Files of the fake engine's pages."""

    parts = Division((0,), 1)
    keeps_prefixes = False

    def __init__(self, llm, mounts):
        """`mounts` has the other replicas, by their URL."""
        self.llm, self.mounts = llm, mounts
        self.strangers = {}
        """Real addresses behind the URLs of some replicas."""
        self.damaged = False
        self.stored = {}
        """Files in tiers, by their segments' keys."""
        self.may_end = asyncio.Event()
        self.may_end.set()
        self.reads = 0

    async def read(self, entry, part):
        self.reads += 1
        await self.may_end.wait()
        assert part == 0
        pages = [self.llm.pages[page] for page in entry.pages]
        assert {tag for tag, _ in pages} == {entry.tag}
        content = json.dumps(["damaged" if self.damaged else str(entry.key), pages[0][1]]).encode()
        return memoryview(content)

    async def keep(self, entry):
        """Stores a segment's file."""
        self.stored[entry.key] = await self.read(entry, 0)

    async def read_stored(self, entry, part):
        file = self.stored.get(entry.key)
        return (Answer(), memoryview(b"")) if file is None else (Answer(tier="host", num_bytes=len(file)), file)

    async def fetch(self, entry, url, secret, limit_s):
        """As a worker does; if cancelled, it ends nevertheless."""
        fetching = asyncio.ensure_future(self._fetch(entry, url, PeerKey(secret), limit_s))
        try:
            return [Answer(fetched=await asyncio.shield(fetching))]
        except asyncio.CancelledError:
            await asyncio.wait([fetching])
            raise

    async def _fetch(self, entry, url, key, limit_s):
        try:
            content = await self._content(url, key, limit_s)
        except (TimeoutError, PeerFileError):
            return "failed"
        if content is None:
            return "absent"
        try:
            key, tokens = json.loads(bytes(content))
            if key != str(entry.key):
                raise ValueError("another key")
        except (ValueError, TypeError, RecursionError) as error:  # as for any wrong file
            raise TransferError(str(error)) from error
        await self.may_end.wait()
        self.llm.pages.update(dict.fromkeys(entry.pages, (entry.tag, tuple(tokens))))
        return "fetched"

    async def _content(self, url, key, limit_s):
        host, path = url[: url.index("/peer")], url[url.index("/peer") :]
        if host in self.strangers:
            real = self.strangers[host] + path
            return await asyncio.to_thread(fetch_file, real, key, "engine-1", LARGEST, limit_s, KeptMemory().take)
        client = httpx.AsyncClient(mounts=self.mounts, headers={FINGERPRINT_HEADER: "engine-1"}, auth=PeerAuth(key))
        try:
            async with asyncio.timeout(limit_s), client:
                response = await client.get(url, params={"part": 0})
        except httpx.HTTPError as error:
            raise PeerFileError(str(error)) from error
        if response.status_code not in (200, 404):
            raise PeerFileError(response.text)
        return response.content if response.status_code == 200 else None


class Node:
    """One replica."""

    def __init__(
        self, name, registry, mounts, *, fingerprint="engine", secret=SECRET, wait_s=5.0, role="both", storages=()
    ):
        self.name, self.id, self.registry, self.role = name, f"{ord(name):012x}", registry, role
        self.storages = storages
        self.llm = FakeLLM()
        config = ChunkCacheConfig(256, PAGE_TOKENS, fingerprint, page_bytes=100)
        self.cache = ChunkCache(self.llm, config, transfers=FakeTransfers(self.llm, mounts))
        self.transfers, self.manager = self.cache.transfers, self.cache.manager
        self.engine = ChunkEngine(self.llm, self.cache)
        self.app = FastAPI()
        self.app.include_router(router)
        self.app.add_middleware(AccessMiddleware, tenants=None, secret=SecretStr(secret))
        self.app.state.tessera = make_context()
        self.app.state.engine_client = self.engine
        self.app.add_exception_handler(GracefulHTTPError, _as_vllm_does)
        mounts[f"http://{name}"] = httpx.ASGITransport(self.app)
        self.client = httpx.AsyncClient(mounts=mounts)
        headers = {FINGERPRINT_HEADER: self.cache.config.peer_fingerprint}
        self.peers_client = httpx.AsyncClient(mounts=mounts, headers=headers, auth=PeerAuth(PeerKey(SECRET)))
        self.is_up = True
        self.source = Peers(
            registry,
            lambda: self.id if self.is_up else None,
            self.cache.config,
            self.cache.metrics,
            lambda: self.cache.transfers,
            self.cache.costs,
            SECRET,
            wait_s=wait_s,
            is_eager=role == "decode",
        )

        self.fetching = ExitStack()
        self.fetching.enter_context(self.cache.fills.also_from(self.source))
        if role == "decode":
            prefillers = Prefillers(self.source, self.peers_client)
            self.fetching.enter_context(self.cache.fills.also_from(prefillers))

    async def join(self):
        url, fingerprint = f"http://{self.name}", self.manager.config.peer_fingerprint
        await self.registry.beat(
            Replica(self.id, self.name, url, ("m",), fingerprint, role=self.role, storages=self.storages)
        )

    async def ask(self, *chunks, adapter=None):
        numbered = tuple(replace(each, document=i) for i, each in enumerate(chunks))
        documents = tuple(map(document_key, chunks))
        lora = SimpleNamespace(lora_name=adapter, lora_int_id=1, lora_path="/none") if adapter else None
        if lora is not None:
            await self.engine.add_lora(lora)
        prompt = ChunkedPrompt(SYSTEM, numbered, (9, 9))
        report = await ask(self.engine, prompt, documents=documents, **({"lora_request": lora} if lora else {}))
        await self.tell()
        return [(each.status, each.origin) for each in report.chunks]

    async def tell(self):
        held, stored = self.cache.holdings.take_changes(1000)
        await self.registry.publish(self.id, held)
        for storage in self.storages:
            await self.registry.publish(storage, stored)

    async def close(self):
        """Nothing is left behind."""
        assert self.manager.is_idle
        self.manager.check_integrity()
        await self.client.aclose()
        await self.peers_client.aclose()


async def _as_vllm_does(_: Request, error: GracefulHTTPError) -> JSONResponse:
    return JSONResponse({"error": {"message": str(error)}}, error.http_status)
