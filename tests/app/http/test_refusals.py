# SPDX-License-Identifier: Apache-2.0
"""Every refusal has a reason, and every reason is documented."""

import re
from http import HTTPStatus
from typing import get_args

import pytest
from fastapi import FastAPI, HTTPException
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.testclient import TestClient

from app.http.refusals import REASONS, RETRY_AFTER_S, Reason, RefusalMiddleware, refusal
from machine.server_process import ROOT


@pytest.fixture
def client():
    app = FastAPI()
    app.add_middleware(RefusalMiddleware)

    @app.get("/vllm/{status}")
    def vllm(status: int):
        return JSONResponse({"error": {"message": "no", "type": "X", "param": None, "code": status}}, status)

    @app.get("/fastapi/{status}")
    def fastapi(status: int):
        raise HTTPException(status, "not so")

    @app.get("/ours")
    def ours():
        return refusal(HTTPStatus.SERVICE_UNAVAILABLE, "stopping", "The server is stopping.")

    @app.get("/streamed")
    def streamed():
        return StreamingResponse(iter([b'{"error": ', b'{"message": "no"}}']), 400, media_type="application/json")

    @app.get("/text")
    def text():
        return PlainTextResponse("no", 404)

    @app.get("/later")
    def later():
        return Response(status_code=503, headers={"Retry-After": "7"})

    @app.get("/fine")
    def fine():
        return {"error": {}}

    return TestClient(app, raise_server_exceptions=False)


@pytest.mark.parametrize(("status", "reason"), REASONS.items())
def test_vllms_refusals_get_one_by_their_status(client, status, reason):
    response = client.get(f"/vllm/{status}")
    assert response.status_code == status
    assert response.json()["error"] == {"message": "no", "type": "X", "param": None, "code": status, "reason": reason}


def test_a_status_that_nobody_thought_of(client):
    assert client.get("/vllm/418").json()["error"]["reason"] == "refused"


def test_other_shapes_become_the_same(client):
    expected = {"message": "not so", "type": "Not Found", "param": None, "code": 404, "reason": "not_found"}
    assert client.get("/fastapi/404").json() == {"error": expected}
    assert client.get("/vllm/x").json()["error"]["reason"] == "bad_request"


def test_ours_stay(client):
    assert client.get("/ours").json()["error"]["reason"] == "stopping"


def test_a_body_in_parts(client):
    assert client.get("/streamed").json()["error"] == {"message": "no", "reason": "bad_request"}


def test_what_is_no_json_or_no_refusal_stays(client):
    assert client.get("/text").text == "no"
    assert client.get("/fine").json() == {"error": {}}


def test_a_503_says_when_to_ask_again(client):
    response = client.get("/fastapi/503")
    assert (response.status_code, response.headers["retry-after"]) == (503, str(RETRY_AFTER_S))
    assert client.get("/later").headers["retry-after"] == "7"


@pytest.mark.parametrize("status", [404, 429, 500])
def test_others_do_not(client, status):
    assert "retry-after" not in client.get(f"/fastapi/{status}").headers


def test_every_reason_is_documented():
    page = (ROOT / "docs" / "api.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| ([\d, ]+|other) \|", page, re.MULTILINE)
    assert sorted(reason for reason, _ in rows) == sorted(get_args(Reason))
    documented = {int(status): reason for reason, statuses in rows for status in re.findall(r"\d+", statuses)}
    for status, reason in REASONS.items():
        assert str(status) in dict(rows)[reason], (status, documented)
