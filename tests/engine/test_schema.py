# SPDX-License-Identifier: Apache-2.0
"""Requests generated from the server's OpenAPI page: no status 5xx, and every response matches the page.

Some hundreds per test run. `make fuzz` sends thousands (SCHEMA_CASES), including systematic cases that omit each field
or set it to its bounds, and bodies with whatever is in the fields that the server knows (FUZZ_EXAMPLES).
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from machine.server_process import ROOT
from tests.app.bodies import texts
from tests.engine.server import TesseraServer
from tests.fuzzing import json_values, perhaps

CASES = int(os.environ.get("SCHEMA_CASES", "300"))
IS_LONG = CASES > 1000
CONFIG = Path(__file__).parent / "schemathesis.toml"


def test_every_answer_is_as_the_openapi_page_says(server: TesseraServer) -> None:
    pytest.importorskip("schemathesis", reason="schemathesis is not installed")
    num_operations = sum(len(operations) for operations in server.get("/openapi.json")["paths"].values())
    phases = "examples,coverage,fuzzing,stateful" if IS_LONG else "examples,fuzzing,stateful"
    run = subprocess.run(
        [
            *(sys.executable, "-m", "schemathesis.cli", "--config-file", str(CONFIG), "run"),
            *("--phases", phases, "--max-examples", str(CASES // num_operations + 2)),
            f"{server.url}/openapi.json",
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    print(run.stdout[-20_000:], run.stderr[-2000:])
    assert run.returncode == 0
    generated = re.search(r"(\d+) generated", run.stdout)
    assert generated is not None
    assert int(generated[1]) >= CASES
    assert server.client.get("/health").status_code == 200


# No body is the server's fault, whatever is in the fields that it knows


Schema = dict[str, Any]

NUMBER = int(os.environ.get("FUZZ_EXAMPLES", "300"))
MOST_TOKENS = 8
"""That an answer may have: what is asked is of interest here."""
_LENGTHS = (
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "max_tokens_per_doc",
    "min_tokens",
    "n",
    "best_of",
)
_LEFT_OUT = ("/sleep", "/wake_up", "/pause", "/resume", "/scale_elastic_ep", "/abort_requests")
_DEPTH = 4
_SCALARS: dict[str, st.SearchStrategy[Any]] = {
    "integer": st.integers(-2, 9),
    "number": st.integers(-2, 9) | st.floats(-2, 2),
    "boolean": st.booleans(),
    "string": texts
    | st.sampled_from(["a", "auto", "none", "user", "text", "json_schema", "root ::= ", "(a|", "resp_1"]),
    "null": st.none(),
}
_UNNAMED_LENGTH = "/v1/rag/chat"
"""Takes a length that its schema doesn't name."""
_QUESTION = {"role": "user", "content": "Why?"}
_USUAL = {"prompt": "Why?", "input": "Why?", "chunks": ["A."], "max_tokens": 1, "max_output_tokens": 1}


def values(schema: Schema, page: Schema, depth: int = _DEPTH) -> st.SearchStrategy[Any]:
    """Values that a schema allows, mostly: deeper ones are anything."""
    if "$ref" in schema:
        return values(page["components"]["schemas"][schema["$ref"].rpartition("/")[2]], page, depth)
    if "enum" in schema or "const" in schema:
        return st.sampled_from(schema.get("enum") or [schema["const"]])
    kinds = schema.get("anyOf") or schema.get("oneOf")
    if depth == 0:
        return json_values
    if kinds:
        return st.one_of([values(kind, page, depth) for kind in kinds])
    if schema.get("properties"):
        return fields(schema, page, depth - 1)
    if schema.get("type") == "array":
        return st.lists(perhaps(values(schema.get("items", {}), page, depth - 1)), max_size=3)
    return _SCALARS.get(schema.get("type", ""), json_values)


def fields(schema: Schema, page: Schema, depth: int) -> st.SearchStrategy[Any]:
    """Objects with what a schema requires, mostly, and a few other fields of it."""
    known = schema["properties"]

    def with_fields(names: list[str]) -> st.SearchStrategy[Any]:
        return st.fixed_dictionaries({name: perhaps(values(known[name], page, depth)) for name in names})

    required = schema.get("required", [])
    chosen = st.lists(st.sampled_from(sorted(known)), max_size=4, unique=True)
    return st.one_of(chosen.map(lambda names: [*required, *names]), chosen).flatmap(with_fields)


def bodies(path: str, schema: Schema, page: Schema) -> st.SearchStrategy[tuple[str, Any]]:
    """A path and a body, usually a question with a few more fields."""
    if "$ref" in schema:
        schema = page["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    if not schema.get("properties"):
        return st.tuples(st.just(path), values(schema, page))
    usual = {name: value for name, value in _USUAL.items() if name in schema["properties"]}
    if "question" in schema["properties"]:
        usual["question"] = "Why?"
    elif "messages" in schema["properties"]:
        usual["messages"] = [_QUESTION]
    named = {"model": "tiny-llama"} if "model" in schema["properties"] else {}
    asked = fields(schema, page, _DEPTH).map(lambda more: {**usual, **more, **named})
    return st.tuples(st.just(path), st.one_of(asked, asked, asked, fields(schema, page, _DEPTH).map(usual.__or__)))


def short(body: Any) -> Any:
    """A body that asks for a few tokens."""
    if not isinstance(body, dict):
        return body
    long = {name for name in _LENGTHS if isinstance(body.get(name), int) and MOST_TOKENS < body[name] < 1 << 31}
    none = {name for name in ("max_tokens", "max_output_tokens") if name in body and body[name] is None}
    return {**body, **dict.fromkeys(long | none, MOST_TOKENS)}


def every_endpoint(page: Schema) -> st.SearchStrategy[tuple[str, Any]]:
    """A request to any endpoint that takes JSON."""
    found = []
    for path, operations in page["paths"].items():
        content = operations.get("post", {}).get("requestBody", {}).get("content", {})
        if "application/json" in content and path not in _LEFT_OUT:
            found.append(bodies(path, content["application/json"].get("schema", {}), page))
    assert len(found) > 10
    return st.one_of(found)


@pytest.fixture
def ask(server: TesseraServer) -> Callable[[str, Any], int]:
    client = httpx.Client(base_url=server.url, timeout=60)

    def status(path: str, body: Any) -> int:
        if path == _UNNAMED_LENGTH and isinstance(body, dict):
            body = {"max_tokens": MOST_TOKENS, **body}
        content = json.dumps(short(body)).encode()
        return client.post(path, content=content, headers={"content-type": "application/json"}).status_code

    return status


@pytest.mark.matrix
def test_no_body_is_the_servers_fault(server: TesseraServer, ask: Callable[[str, Any], int]) -> None:
    wrong: dict[tuple[str, int], Any] = {}

    @settings(max_examples=NUMBER, suppress_health_check=list(HealthCheck))
    @given(every_endpoint(server.get("/openapi.json")))
    def asked(request: tuple[str, Any]) -> None:
        path, body = request
        status = ask(path, body)
        if status >= 500 and status != 503:
            wrong.setdefault((path, status), body)

    asked()
    assert not wrong
    assert server.stats()["enabled"]
    assert server.chat(question="Why?", chunks=["A."], max_tokens=1)["cache"]["mode"] == "chunked"
