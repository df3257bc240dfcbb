# SPDX-License-Identifier: Apache-2.0
"""Records of handed-over requests: equal only if the KV is."""

from contextlib import suppress

import pytest
from hypothesis import given

from engine_ext.wire.handover import HANDOVER_KEY, Handover
from tests.fuzzing import json_values

OWN = Handover.of("chunked", "copy", "salt", "order", [1, 2, 3])


def test_a_record_comes_back():
    assert Handover.from_params({"remote_host": "x", **OWN.to_params()}) == OWN


@pytest.mark.parametrize(
    "other",
    [
        Handover.of("full", "copy", "salt", "order", [1, 2, 3]),
        Handover.of("chunked", "in-place", "salt", "order", [1, 2, 3]),
        Handover.of("chunked", "copy", "other", "order", [1, 2, 3]),
        Handover.of("chunked", "copy", "salt", "another", [1, 2, 3]),
        Handover.of("chunked", "copy", "salt", "order", [1, 3, 2]),
        Handover.of("chunked", "copy", "salt", "order", [1, 2]),
    ],
)
def test_other_kv_has_another_record(other):
    assert other != OWN


def test_a_later_version_is_none_of_ours():
    assert Handover.from_params({HANDOVER_KEY: {"version": 2, "anything": 1}}) is None


@pytest.mark.parametrize("changed", [{"mode": "half"}, {"placement": []}, {"digest": 5}, {"more": 1}, {"version": "1"}])
def test_malformed_records_are_refused(changed):
    fields = OWN.to_params()[HANDOVER_KEY]
    with pytest.raises(ValueError, match=HANDOVER_KEY):
        Handover.from_params({HANDOVER_KEY: {**fields, **changed}})


@given(json_values)
def test_anything_else_is_refused_or_a_record(value):
    with suppress(ValueError):
        assert isinstance(Handover.from_params({HANDOVER_KEY: value}), Handover | None)
