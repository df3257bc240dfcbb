# SPDX-License-Identifier: Apache-2.0
"""The OpenAPI page describes the responses of Tessera's endpoints."""

import pytest
from fastapi import FastAPI

from app.http.answers import OUR_TAGS, Report, correct_openapi
from app.routes import cache, chunks, cluster, rag, split
from tests.app.helpers import make_report


@pytest.fixture(scope="module")
def page():
    app = FastAPI()
    for module in (rag, split, chunks, cache, cluster):
        app.include_router(module.router)
    correct_openapi(app)
    return app.openapi()


def operations(page):
    return [
        (f"{method} {path}", operation)
        for path, methods in page["paths"].items()
        for method, operation in methods.items()
    ]


def test_every_endpoint_says_the_shape_of_its_answer_and_of_its_errors(page):
    assert len(operations(page)) == 12
    for name, operation in operations(page):
        assert OUR_TAGS & set(operation["tags"]), name
        assert "422" not in operation["responses"], name
        for status, response in operation["responses"].items():
            for content in response["content"].values():
                assert content["schema"], (name, status)
            if status != "200":
                assert response["content"]["application/json"]["schema"]["$ref"].endswith("/Refusal"), name


def test_a_report_has_the_shape_that_the_page_says():
    Report.model_validate(make_report().to_dict())
