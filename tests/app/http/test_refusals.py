# SPDX-License-Identifier: Apache-2.0
"""Every refusal has a reason, and every reason is documented."""

import re
from http import HTTPStatus
from typing import get_args

import pytest
from fastapi import FastAPI
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.testclient import TestClient

from app.http.refusals import REASONS, RETRY_AFTER_S, Reason, RefusalMiddleware, refusal
from machine.server_process import ROOT


def passed(app):
    """An app's answer, as it leaves the middleware."""
    return TestClient(RefusalMiddleware(app)).get("/")


def vllms(status):
    return {"message": "no", "type": "X", "param": None, "code": status}


@pytest.mark.parametrize(("status", "reason"), [*REASONS.items(), (418, "refused")])
def test_vllms_refusals_get_one_by_their_status(status, reason):
    response = passed(JSONResponse({"error": vllms(status)}, status))
    assert response.status_code == status
    assert response.json()["error"] == {**vllms(status), "reason": reason}
    assert response.headers.get("retry-after") == (str(RETRY_AFTER_S) if status == 503 else None)


def test_other_shapes_become_the_same():
    app = FastAPI()

    @app.get("/{number}")
    def takes_a_number(number: int): ...

    client = TestClient(RefusalMiddleware(app))
    assert client.get("/x").json()["error"]["reason"] == "bad_request"
    expected = {"message": "Not Found", "type": "Not Found", "param": None, "code": 404, "reason": "not_found"}
    assert client.get("/x/y").json() == {"error": expected}
    parts = iter([b'{"error": ', b'{"message": "no"}}'])
    response = passed(StreamingResponse(parts, 400, media_type="application/json"))
    assert response.json()["error"] == {"message": "no", "reason": "bad_request"}


def test_ours_stay_and_so_does_what_is_no_json_or_no_refusal():
    ours = refusal(HTTPStatus.SERVICE_UNAVAILABLE, "stopping", "The server is stopping.", headers={"Retry-After": "7"})
    assert passed(ours).json()["error"]["reason"] == "stopping"
    assert passed(ours).headers["retry-after"] == "7"
    assert passed(PlainTextResponse("no", 404)).text == "no"
    assert passed(JSONResponse({"error": {}})).json() == {"error": {}}
    assert passed(Response(status_code=503)).headers["retry-after"] == str(RETRY_AFTER_S)


def test_every_reason_is_documented():
    page = (ROOT / "docs" / "api.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| ([\d, ]+|other) \|", page, re.MULTILINE)
    assert sorted(reason for reason, _ in rows) == sorted(get_args(Reason))
    for status, reason in REASONS.items():
        assert str(status) in dict(rows)[reason], status
