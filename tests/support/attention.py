# SPDX-License-Identifier: Apache-2.0
"""The oracle's attention of a question to its chunks, less that of a question without content."""

from typing import Any

from tests.engine.server import TesseraServer
from tests.oracle import Oracle
from tests.support.exactness import segments


def attention(
    server: TesseraServer, oracle: Oracle, report: dict[str, Any], layer: int, strategy: str = "offset"
) -> list[list[float]]:
    """For each token of each chunk of an explained report."""
    system, chunks, question = segments(report)
    asked = {"chunks": ["a"], "question": "N/A", "max_tokens": 1, "cache": {"explain": True, "recompute": 0}}
    blank = segments(server.post("/v1/rag/chat", asked)["cache"])[2]
    paid, at_least = (
        oracle.attention(strategy, (system, chunks, each), [layer], report.get("opening")) for each in (question, blank)
    )
    return [[a - b for a, b in zip(*each, strict=True)] for each in zip(paid, at_least, strict=True)]
