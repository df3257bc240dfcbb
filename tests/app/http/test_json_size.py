# SPDX-License-Identifier: Apache-2.0
"""How many values JSON has, whatever is in its strings."""

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.http import json_size
from app.http.json_size import MOST_CONTAINERS, MOST_DIGITS, MOST_ESCAPES, MOST_VALUES, is_too_complex
from tests.fuzzing import json_values
from tests.support.loops import longest_pause


@pytest.mark.parametrize(
    "value",
    [
        [[]] * (MOST_CONTAINERS - 1),
        list(range(MOST_VALUES - 1)),
        ['[{,"\\' * MOST_VALUES],
        {'a"b,[': "\\" * 1001 + '"' + "," * MOST_VALUES},
        [0.12345678901234567, 1e300, True, False, None] * (MOST_VALUES // 5),
        ["9" * 5000, 2**64, int("9" * MOST_DIGITS)],
    ],
)
def test_what_is_parsed(value):
    assert not is_too_complex(json.dumps(value).encode())


@pytest.mark.parametrize(
    "body",
    [
        *(b"[" * (MOST_CONTAINERS + 1), b"[" + b"{}," * MOST_CONTAINERS, b"[" + b"1," * MOST_VALUES),
        b'["\\\\"' + b",[]" * MOST_CONTAINERS,  # behind a backslash
        b'{"a": "\\"", "b": [' + b"[]," * MOST_CONTAINERS,  # behind a quote
        *(b"[" * 9 + b"9" * (MOST_DIGITS + 1), json.dumps(["\n" * (MOST_ESCAPES + 1)]).encode(), b'"' * (1 << 20)),
    ],
    ids=range(8),
)
def test_what_is_not(body):
    assert is_too_complex(body)


@given(json_values)
def test_no_value_escapes_the_count(value):
    """Whatever json.loads makes of it: as many containers as it has are too many where one less may be."""
    body = json.dumps(value).encode()
    containers = num_containers(json.loads(body))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(json_size, "_LONG_NUMBER", b"9" * 1000)
        patched.setattr(json_size, "MOST_CONTAINERS", containers)
        assert not is_too_complex(body)
        patched.setattr(json_size, "MOST_CONTAINERS", containers - 1)
        assert is_too_complex(body) or not containers


def num_containers(value):
    if isinstance(value, dict):
        return 1 + sum(map(num_containers, value.values()))
    return 1 + sum(map(num_containers, value)) if isinstance(value, list) else 0


@given(st.binary(max_size=200))
def test_anything_can_be_counted(body):
    assert not is_too_complex(body)


@pytest.mark.parametrize("body", [b'"a",' * (4 << 20), b'"\\"' * (4 << 20)], ids=["strings", "escapes"])
async def test_others_run_meanwhile(body):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(json_size, "MOST_VALUES", 1 << 40)
        patched.setattr(json_size, "MOST_ESCAPES", 1 << 40)
        pause, _ = await longest_pause(asyncio.to_thread(is_too_complex, body))
    assert pause < 0.2
