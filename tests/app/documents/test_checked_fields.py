# SPDX-License-Identifier: Apache-2.0
"""Requests that vLLM would answer with status 500 are refused as the client's fault."""

from contextlib import suppress

import pytest
from hypothesis import given

from app.documents.checked_fields import LONGEST_REQUEST_ID, MOST_ITEMS, MOST_PARTS, MOST_PROMPTS, check_fields
from app.documents.document import BadRequestError
from tests.app.helpers import refused
from tests.fuzzing import json_values


def schema(value):
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": value}}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("vllm_xargs", {"kv_transfer_params": "x"}),
        ("vllm_xargs", "x"),
        ("kv_transfer_params", "x"),
        ("model", "x" * 1025),
        ("bad_words", ["word " * 10_000]),
        ("bad_words", ["a" * 100 + str(number) for number in range(1000)]),
        ("stop", "a" * 20_000),
        ("logprobs", "9" * (1 << 21)),
        ("response_format", schema({"const": "a" * (1 << 21)})),
        ("messages", [{"role": "assistant", "tool_calls": [{"function": {"arguments": "[" + "[]," * 300_000}}]}]),
        ("input", [{"type": "function_call", "arguments": "[" + "1," * 200_000}] * 2),
        ("structured_outputs", "x"),
        ("structured_outputs", ["json"]),
        ("structured_outputs", {"grammar": "root ::= "}),
        ("structured_outputs", {"json": {"$ref": "#"}}),
        ("structured_outputs", {"json": '{"$ref": "#"}'}),
        ("structured_outputs", {"json": {"$ref": "#/a", "a": {"$ref": "#/b"}, "b": {"$ref": "#/a"}}}),
        ("response_format", "json"),
        ("response_format", schema({"$ref": "#"})),
        *(("structured_outputs", {"json": f'{{"$ref": "#", "a": {a}}}'}) for a in ('"\\ud800"', "[" * 250 + "]" * 250)),
        ("request_id", "a\nERROR b"),
        ("request_id", "x" * (LONGEST_REQUEST_ID + 1)),
        ("request_id", 5),
        ("top_k", 2**70),
        ("seed", -(2**63) - 1),
        ("logit_bias", {"1": [10**400]}),
        ("chunks", [{str(number): 1 for number in range(MOST_ITEMS + 1)}]),
        ("tools", [[1] * MOST_ITEMS] * (MOST_PARTS // MOST_ITEMS)),
        ("prompt", ["a"] * (MOST_ITEMS + 1)),
        ("prompt", [7] * MOST_ITEMS + [None]),
        ("prompt", [[7]] * (MOST_PROMPTS + 1)),
        ("prompt", ["a"] * (MOST_PROMPTS + 1)),
        ("messages", [{"role": "user", "content": [1] * (MOST_ITEMS + 1)}]),
        ("messages", [7] * (MOST_ITEMS + 1)),
        ("logit_bias", {str(number): 1 for number in range(MOST_ITEMS + 1)}),
        *(("temperature", float(number)) for number in ("nan", "inf")),
    ],
)
def test_what_is_refused(field, value):
    with refused(field):
        check_fields({"messages": [], field: value})
    with refused("body"):
        check_fields({f"name{number}": 1 for number in range(MOST_ITEMS + 1)})


@pytest.mark.parametrize(
    "fields",
    [
        {"vllm_xargs": {"a": 1}, "request_id": "chat-1", "top_k": -1, "seed": 2**63 - 1, "stop": ["😀"]},
        {"structured_outputs": {"grammar": 'root ::= "a" | "b"'}},
        {"structured_outputs": {"grammar": "?start: rule\nrule: /a+/"}},
        {"structured_outputs": {"grammar": "root ::=\n  item+\nitem ::= [a-z]"}},
        {"structured_outputs": {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"properties": {"b": {"$ref": "#"}}}}}}},
        {"prompt": [7] * 100_000, "stop_token_ids": [7] * 9000, "chunks": ["a"] * 5000},
        {"prompt": [[7] * 9000, [7] * 9000], "input": "[," * 9000},
        {"response_format": {"type": "json_object"}, "structured_outputs": None, "request_id": None},
        {"bad_words": ["a", "b"] * 500, "stop": None},
        {"prompt": ["a"] * MOST_PROMPTS},
        {"messages": [{"tool_calls": [{"function": {"arguments": '{"file": "' + "line\\n" * 500_000 + '"}'}}]}]},
    ],
)
def test_what_is_not(fields):
    check_fields(fields)


@given(json_values)
def test_any_json_can_be_checked(value):
    with suppress(BadRequestError):
        check_fields({"vllm_xargs": value, "structured_outputs": value, "response_format": value})


@pytest.mark.parametrize(
    ("field", "value"), [("previous_response_id", "resp_1"), ("request_id", "resp_1"), ("background", True)]
)
def test_tenants_do_not_share_responses(field, value):
    """vLLM finds any response by its id, takes ids from requests, and computes some in the background, unlimited."""
    check_fields({field: value})
    with refused(field, "all tenants"):
        check_fields({field: value}, keeps_responses_apart=False)
    check_fields({"background": False}, keeps_responses_apart=False)
