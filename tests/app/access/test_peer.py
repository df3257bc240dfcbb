# SPDX-License-Identifier: Apache-2.0
"""Requests with and without the peers' secret."""

from types import SimpleNamespace

import pytest
from fastapi import FastAPI
from pydantic import SecretStr
from starlette.testclient import TestClient

from app.access.peer import SECRET_HEADER, PeerMiddleware
from engine_ext.wire.caller import IS_PEER


def client(secret):
    app = FastAPI()
    app.add_middleware(PeerMiddleware)
    app.state.tessera_settings = SimpleNamespace(peer_secret=secret)

    @app.get("/")
    async def is_peer():
        return IS_PEER.get()

    return TestClient(app)


@pytest.mark.parametrize(
    ("secret", "given", "expected"),
    [
        ("the right secret", "the right secret", True),
        ("the right secret", "another secret", False),
        ("the right secret", "", False),
        ("the right secret", None, False),
        (None, "", False),
        (None, "any", False),
    ],
)
def test_only_the_secret_makes_a_peer(secret, given, expected):
    headers = {SECRET_HEADER: given} if given is not None else {}
    asking = client(SecretStr(secret) if secret else None)
    assert asking.get("/", headers=headers).json() is expected
    assert asking.get("/").json() is False
