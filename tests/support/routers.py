# SPDX-License-Identifier: Apache-2.0
"""Routers, and answers through them."""

from typing import Any

import pytest

from machine.server_process import ServerProcess
from tests.support.waiting import until

ROUTE = ("app.cli", "route")
ASKED = {"question": "What?", "max_tokens": 4, "temperature": 0, "logprobs": True}


class Router(ServerProcess):
    """A `tessera route` process."""

    def cluster(self) -> dict[str, Any]:
        return self.client.get("/v1/cluster").json()

    def names(self) -> list[str]:
        return [replica["name"] for replica in self.cluster()["replicas"]]

    def wait_for(self, *names: str, seconds: float = 15) -> None:
        until(lambda: self.names() == sorted(names), seconds)


def statuses(answer: dict[str, Any]) -> list[str]:
    return [chunk["status"] for chunk in answer["cache"]["chunks"]]


def words(answer: dict[str, Any]) -> list[Any]:
    """The answer's tokens and their log probabilities."""
    content = answer["choices"][0]["logprobs"]["content"]
    return [(token["token"], pytest.approx(token["logprob"], abs=1e-4)) for token in content]
