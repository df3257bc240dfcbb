# SPDX-License-Identifier: Apache-2.0
"""A replica that prefills and one that decodes."""

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from app.commands.cluster import shares
from machine.server_process import free_port
from tests.engine.conftest import COMMON
from tests.engine.server import TesseraServer
from tests.redis_server import RedisServer
from tests.support.routers import ROUTE, Router

SECRET = "of these replicas alone"


class Split:
    """Replicas of both roles behind a router; `flags` are theirs, `of_decode` further ones of one role."""

    def __init__(self, stack: ExitStack, folder: Path, model: Path, *flags: str, of_decode: Sequence[str] = ()) -> None:
        self._stack, self._folder, self._model = stack, folder, model
        redis = RedisServer(folder)
        stack.callback(redis.stop)
        self._registry = ("--registry", redis.url)
        self._flags = {"prefill": (*COMMON, *flags), "decode": (*COMMON, *flags, *of_decode)}
        self.decode = self.start("decode")
        log, secret = folder / "router.log", {"TESSERA_PEER_SECRET": SECRET}
        self.router = Router(log, *self._registry, environment=secret, serve=ROUTE)
        stack.callback(self.router.stop)

    def start(self, role: str) -> TesseraServer:
        log = self._folder / f"{role}-{len(list(self._folder.glob('*.log')))}.log"
        named = ("--replica-name", role, "--role", role)
        flags = (str(self._model), "--dtype", "float32", *self._flags[role], *self._registry, *named)
        nixl = {"UCX_TLS": "tcp", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
        server = TesseraServer(log, *flags, environment={"TESSERA_PEER_SECRET": SECRET, **nixl})
        self._stack.callback(server.stop)
        # A core for each role: NIXL's thread polls.
        os.sched_setaffinity(server.process.pid, shares(sorted(os.sched_getaffinity(0)), 2)[role == "prefill"])
        return server.wait_ready()

    def ask(self, *chunks: str, strategy: str = "shared") -> dict[str, Any]:
        """An answer through the router, with all that the oracle needs."""
        body = {"system": "You answer.", "chunks": chunks, "question": "What is it?", "max_tokens": 8}
        body |= {"temperature": 0, "ignore_eos": True, "logprobs": True, "return_token_ids": True}
        cache = {"position_strategy": strategy, "explain": True}
        response = self.router.client.post("/v1/rag/chat", json={**body, "cache": cache})
        assert response.status_code == 200, response.text
        assert response.headers["x-tessera-replica"] == "decode"
        return response.json()
