# SPDX-License-Identifier: Apache-2.0
"""Records of handed-over requests: equal only if the KV is."""

from contextlib import suppress

import pytest
from hypothesis import given

from engine_ext.wire.handover import HANDOVER_KEY, Handover
from tests.fuzzing import json_values

OWN = Handover.of("chunked", "copy", "salt", "order", [1, 2, 3])


def test_a_record_comes_back_and_a_later_version_is_none_of_ours():
    assert Handover.from_params({"remote_host": "x", **OWN.to_params()}) == OWN
    assert Handover.from_params({HANDOVER_KEY: {"version": 2, "anything": 1}}) is None


@pytest.mark.parametrize(
    ("place", "value"),
    [(0, "full"), (1, "in-place"), (2, "other"), (3, "another"), (4, [1, 3, 2]), (4, [1, 2])],
    ids=["mode", "placement", "salt", "order of blocks", "order of tokens", "number of tokens"],
)
def test_other_kv_has_another_record(place, value):
    given = ["chunked", "copy", "salt", "order", [1, 2, 3]]
    given[place] = value
    assert Handover.of(*given) != OWN


@pytest.mark.parametrize("changed", [{"mode": "half"}, {"placement": []}, {"digest": 5}, {"more": 1}, {"version": "1"}])
def test_malformed_records_are_refused(changed):
    fields = OWN.to_params()[HANDOVER_KEY]
    with pytest.raises(ValueError, match=HANDOVER_KEY):
        Handover.from_params({HANDOVER_KEY: {**fields, **changed}})


@given(json_values)
def test_anything_else_is_refused_or_a_record(value):
    with suppress(ValueError):
        assert isinstance(Handover.from_params({HANDOVER_KEY: value}), Handover | None)
