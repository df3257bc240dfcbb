# SPDX-License-Identifier: Apache-2.0
"""Ordinary completions."""

from typing import Any

from tests.engine.server import TesseraServer
from tests.support.exactness import STEPS


def complete(server: TesseraServer, token_ids: list[int]) -> list[float]:
    """Log probabilities of an ordinary completion of `token_ids`."""
    body = {"prompt": token_ids, "max_tokens": STEPS, "temperature": 0, "ignore_eos": True, "logprobs": 0}
    answer = server.post("/v1/completions", {**body, "model": server.model})
    return answer["choices"][0]["logprobs"]["token_logprobs"]


def all_tokens(report: dict[str, Any]) -> list[int]:
    return [token for segment in report["segments"] for token in segment["token_ids"]]
