# SPDX-License-Identifier: Apache-2.0
"""Retry-After on every 503."""

import pytest
from fastapi import FastAPI, HTTPException
from starlette.responses import Response
from starlette.testclient import TestClient

from app.http.retry_after import SECONDS, RetryAfterMiddleware


@pytest.fixture
def client():
    app = FastAPI()
    app.add_middleware(RetryAfterMiddleware)

    @app.get("/raised/{status}")
    def raised(status: int):
        raise HTTPException(status)

    @app.get("/given")
    def given():
        return Response(status_code=503, headers={"Retry-After": "7"})

    return TestClient(app)


def test_a_503_says_when_to_ask_again(client):
    response = client.get("/raised/503")
    assert (response.status_code, response.headers["retry-after"]) == (503, str(SECONDS))


@pytest.mark.parametrize("status", [404, 429, 500])
def test_others_do_not(client, status):
    assert "retry-after" not in client.get(f"/raised/{status}").headers


def test_what_the_app_itself_says_counts(client):
    assert client.get("/given").headers["retry-after"] == "7"
