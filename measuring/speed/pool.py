# SPDX-License-Identifier: Apache-2.0
"""The chunk pool of a running Tessera, as its server describes it."""

from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from measuring.speed.rag import BenchmarkError
from measuring.speed.systems import Server


@dataclass(frozen=True, slots=True)
class Pool:
    """Pages in all, those that hold nothing, and what one holds."""

    pages: int
    free: int
    page_tokens: int
    page_bytes: int
    """On all workers together."""

    def pages_for(self, tokens: int) -> int:
        """Pages that a chunk takes."""
        return -(-tokens // self.page_tokens)


async def pool_of(server: Server) -> Pool:
    """The pool of this server; raises :class:`BenchmarkError` if its chunk cache is off."""
    occupancy = (await _stats(server))["occupancy"]
    families = text_string_to_metric_families((await _get(server, "/metrics")).text)
    values = {sample.name: sample.value for family in families for sample in family.samples}
    pages, size = occupancy["pages_total"], int(values["tessera_pool_bytes"])
    return Pool(pages, occupancy["pages_free"], occupancy["page_tokens"], size // pages)


async def _stats(server: Server) -> dict[str, Any]:
    stats: dict[str, Any] = (await _get(server, "/v1/cache/stats")).json()
    if not stats["enabled"]:
        raise BenchmarkError(f"{server.name}: the chunk cache is off: {stats['reason']}")
    return stats


async def _get(server: Server, path: str) -> httpx.Response:
    try:
        response = await server.http.get(path)
    except httpx.HTTPError as error:
        raise BenchmarkError(f"{server.name}: {path}: {type(error).__name__} {error}") from error
    if response.status_code != HTTPStatus.OK:
        raise BenchmarkError(f"{server.name}: {path}: {response.status_code}: {response.text[-500:]}")
    return response
