# SPDX-License-Identifier: Apache-2.0
"""The request field ``cache``."""

import pytest

from app.documents.cache_options import parse_cache_field
from cache.positions.layout import PositionStrategy
from cache.sparse import Sparse
from engine_ext.client.request import CacheOptions
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
    ("given", "default", "sparse"),
    [
        ({}, None, None),
        ({}, Sparse(100), Sparse(100)),
        ({"sparse": {}}, None, Sparse()),
        ({"sparse": {}}, Sparse(100), Sparse(100)),
        ({"sparse": {"budget_share": 0.25, "mass": 0.9}}, Sparse(100), Sparse(100, 0.25, 0.9)),
        ({"sparse": {"budget_tokens": 900}}, Sparse(100), Sparse(900)),
        ({"sparse": {"gaps": "close"}}, Sparse(100), Sparse(100, closes_gaps=True)),
    ],
)
def test_budgets_are_completed_by_the_servers(given, default, sparse):
    assert parse_cache_field(given).options(None, CacheOptions(sparse=default)).sparse == sparse


@pytest.mark.parametrize(
    ("value", "parameter", "message"),
    [
        ({"mode": "fast"}, "cache.mode", "'auto', 'chunked' or 'full'"),
        ({"position_strategy": "x"}, "cache.position_strategy", "'shared', 'parallel', 'offset' or 'window'"),
        ({"scope": "global"}, "cache.scope", "'system' or 'isolated'"),
        ({"namespace": ""}, "cache.namespace", "at least 1 character"),
        ({"namespace": "n" * 129}, "cache.namespace", "at most 128 characters"),
        ({"namespace": 5}, "cache.namespace", "valid string"),
        ({"explain": "perhaps"}, "cache.explain", "valid boolean"),
        ({"sparse": {"budget_tokens": 0}}, "cache.sparse.budget_tokens", "greater than or equal to 1"),
        ({"sparse": {"budget_share": 0}}, "cache.sparse.budget_share", "greater than 0"),
        ({"sparse": {"gaps": "fill"}}, "cache.sparse.gaps", "'keep' or 'close'"),
        ({"sparse": {"mass": 1.5}}, "cache.sparse.mass", "less than or equal to 1"),
        ({"sparse": {"budget": 5}}, "cache.sparse.budget", "Extra inputs are not permitted"),
        ({"modus": "auto"}, "cache.modus", "Extra inputs are not permitted"),
        (["auto"], "cache", "valid dictionary"),
        ("auto", "cache", "valid dictionary"),
    ],
)
def test_an_error_names_the_field(value, parameter, message):
    with refused(parameter, message):
        parse_cache_field(value)
