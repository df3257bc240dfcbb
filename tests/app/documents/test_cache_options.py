# SPDX-License-Identifier: Apache-2.0
"""The request field ``cache``."""

import pytest

from app.documents.cache_options import parse_cache_field
from cache.positions.layout import PositionStrategy
from engine_ext.wire.request import CacheOptions
from tests.app.helpers import refused


@pytest.mark.parametrize("value", [None, {}])
def test_nothing_given_is_the_defaults(value):
    options = parse_cache_field(value).options(None, CacheOptions(position_strategy=PositionStrategy.OFFSET))
    assert options == CacheOptions("auto", PositionStrategy.OFFSET, "system", "default", explain=False)


def test_every_choice_reaches_the_engine():
    field = parse_cache_field(
        {
            "mode": "chunked",
            "position_strategy": "shared",
            "scope": "isolated",
            "namespace": "n",
            "explain": True,
        }
    )
    expected = CacheOptions("chunked", PositionStrategy.SHARED, "isolated", "n", explain=True)
    assert field.options(None, CacheOptions(position_strategy=PositionStrategy.OFFSET)) == expected


@pytest.mark.parametrize(
    ("value", "parameter", "message"),
    [
        ({"mode": "fast"}, "cache.mode", "'auto', 'chunked', 'full' or 'compare'"),
        ({"position_strategy": "x"}, "cache.position_strategy", "'shared', 'parallel', 'offset' or 'window'"),
        ({"scope": "global"}, "cache.scope", "'system' or 'isolated'"),
        ({"namespace": ""}, "cache.namespace", "at least 1 character"),
        ({"namespace": "n" * 129}, "cache.namespace", "at most 128 characters"),
        ({"namespace": 5}, "cache.namespace", "valid string"),
        ({"explain": "perhaps"}, "cache.explain", "valid boolean"),
        ({"modus": "auto"}, "cache.modus", "Extra inputs are not permitted"),
        (["auto"], "cache", "valid dictionary"),
        ("auto", "cache", "valid dictionary"),
    ],
)
def test_an_error_names_the_field(value, parameter, message):
    with refused(parameter, message):
        parse_cache_field(value)
