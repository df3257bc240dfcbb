# SPDX-License-Identifier: Apache-2.0
"""Requests in full attention."""

from typing import Any

from tests.engine.server import TesseraServer
from tests.support.exactness import ask


def full_attention(server: TesseraServer, chunks: list[str], question: str, reason: str) -> dict[str, Any]:
    assert reason in server.client.get("/v1/cache/stats").json()["reason"]
    response = ask(server, "shared", chunks, question)
    report = response["cache"]
    assert report["mode"] == "full"
    assert reason in report["reason"]
    assert [chunk["status"] for chunk in report["chunks"]] == [None] * len(chunks)
    return response
