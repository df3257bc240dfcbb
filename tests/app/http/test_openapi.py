# SPDX-License-Identifier: Apache-2.0
"""The OpenAPI page says what our endpoints answer."""

import json

import jsonschema
import pytest
from fastapi import FastAPI

from app.http.openapi import OUR_TAGS, correct_openapi
from app.routes import cache, chunks, cluster, collections, rag, split
from cache.lease import ChunkStatus
from cache.positions.layout import Chunk, PositionStrategy, pack
from cache.report import Decided, Report, Segment


@pytest.fixture(scope="module")
def page():
    app = FastAPI()
    for module in (rag, split, chunks, collections, cache, cluster):
        app.include_router(module.router)
    correct_openapi(app)
    return app.openapi()


def operations(page):
    return [(f"{method} {path}", each) for path, methods in page["paths"].items() for method, each in methods.items()]


def test_every_endpoint_says_the_shape_of_its_answer_and_of_its_errors(page):
    of_chunks = [f"{method} /v1/rag/chunks/{{key}}" for method in ("delete", "get", "patch")]
    of_collections = [f"{method} /v1/rag/collections/{{name}}" for method in ("delete", "get", "post")]
    assert sorted(name for name, _ in operations(page)) == sorted(
        [
            *(f"post /v1/rag/{name}" for name in ("chat", "chunks", "plan", "split")),
            *("get /v1/rag/chunks", *of_chunks),
            *("get /v1/rag/collections", *of_collections, "get /v1/rag/collections/{name}/passages"),
            *("get /v1/cache/stats", "post /v1/cache/clear", "post /v1/cache/sleep", "get /v1/cluster"),
        ]
    )
    for name, operation in operations(page):
        assert operation["summary"], name
        assert operation["description"], name
        assert OUR_TAGS & set(operation["tags"]), name
        assert "422" not in operation["responses"], name
        for status, response in operation["responses"].items():
            for content in response["content"].values():
                assert content["schema"], (name, status)
            if status != "200":
                assert response["content"]["application/json"]["schema"]["$ref"].endswith("/Refusal"), name


def test_vllms_endpoints_have_the_refusals_that_any_endpoint_may_give():
    app = FastAPI()
    correct_openapi(app)

    @app.post("/v1/completions", responses={400: {"description": "vLLM's own"}})
    def complete(prompt: str) -> str:
        return prompt

    (responses,) = [each["responses"] for _, each in operations(app.openapi())]
    assert set(responses) == {"200", "400", "401", "403", "408", "413", "422", "429", "503"}
    assert responses["400"]["description"] == "vLLM's own"


@pytest.mark.parametrize("is_full", [True, False])
def test_a_report_has_the_shape_that_the_page_says(page, is_full):
    report = Report.begun(PositionStrategy.OFFSET, "isolated", 9, [Chunk(pack((1, 2)), "d1", 0, (1, 2))])
    if not is_full:
        report.mode, report.placement, report.opening = "chunked", "in-place", (1, 2)
        report.decision, report.recompute = Decided(mode="offset", why="asked"), 0.5
        report.reread, report.tokens.reread = 0.25, 2
        report.segments = [Segment(kind="system", token_ids=(1, 2), position=0)]
        chunk = report.chunks[0]
        chunk.key, chunk.status, chunk.origin, chunk.why = "00", ChunkStatus.FETCHED, "replica-1", "damaged"
        chunk.recomputed, chunk.reread = [(0, 1)], True
    shown = json.loads(json.dumps(report.to_dict()))
    schema = {"$ref": "#/components/schemas/Report", "components": page["components"]}
    jsonschema.validate(shown, schema)
    assert Report.model_validate(shown) == report
    del shown["chunks"][0]["status"]
    with pytest.raises(jsonschema.ValidationError, match="'status' is a required property"):
        jsonschema.validate(shown, schema)
