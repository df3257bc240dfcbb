# SPDX-License-Identifier: Apache-2.0
"""Ordinary prompts that servers keep in tiers."""

import time
from typing import Any

from tests.engine.server import TesseraServer
from tests.support.waiting import until

STEPS = 8
"""Tokens of an answer."""


def complete(server: TesseraServer, prompt: list[int], **fields: Any) -> tuple[int, list[int], list[float]]:
    """Cached tokens of an ordinary prompt, and the answer's tokens with their log probabilities."""
    body = {"model": server.model, "prompt": prompt, "max_tokens": STEPS, "temperature": 0, "ignore_eos": True}
    headers = fields.pop("headers", {})
    body |= {"logprobs": 0, "return_token_ids": True, **fields}
    response = server.client.post("/v1/completions", json=body, headers=headers)
    assert response.status_code == 200, response.text
    answer = response.json()
    details, (choice,) = answer["usage"]["prompt_tokens_details"] or {}, answer["choices"]
    return details.get("cached_tokens") or 0, choice["token_ids"], choice["logprobs"]["token_logprobs"]


def tokens_of(server: TesseraServer, text: str) -> list[int]:
    return server.post("/tokenize", {"model": server.model, "prompt": text})["tokens"]


def settle(server: TesseraServer) -> None:
    """Waits until nothing waits to be stored."""
    # The server counts waiting blocks twice a second: until the next count, it may say 0 though blocks have come.
    time.sleep(2)
    until(lambda: not server.occupancy()["archive_waiting"])
