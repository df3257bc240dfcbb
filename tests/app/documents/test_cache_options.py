# SPDX-License-Identifier: Apache-2.0
"""The request field ``cache``."""

import pytest

from app.documents.cache_options import parse_cache_field
from cache.positions.layout import PositionStrategy
from cache.sparse import Sparse
from engine_ext.client.request import CacheOptions
from tests.app.helpers import refused

DEFAULTS = CacheOptions(position_strategy=PositionStrategy.OFFSET)
QUARTER = Sparse(budget_share=0.25)


def test_every_choice_reaches_the_engine_and_without_one_the_defaults_do():
    assert [parse_cache_field(value).options(None, DEFAULTS) for value in (None, {})] == [DEFAULTS] * 2
    given = {"mode": "chunked", "position_strategy": "shared", "scope": "isolated", "namespace": "n", "explain": True}
    expected = CacheOptions("chunked", PositionStrategy.SHARED, "isolated", "n", explain=True)
    assert parse_cache_field(given).options(None, DEFAULTS) == expected


@pytest.mark.parametrize(
    ("given", "default", "sparse"),
    [
        ({}, QUARTER, QUARTER),
        ({"sparse": {}}, None, Sparse()),
        ({"sparse": {"mass": 0.9}}, QUARTER, Sparse(None, 0.25, 0.9)),
        ({"sparse": {"budget_share": 0.5}}, QUARTER, Sparse(None, 0.5)),
        ({"sparse": {"budget_tokens": 900}}, QUARTER, Sparse(900)),
        ({"sparse": {"gaps": "close"}}, QUARTER, Sparse(None, 0.25, closes_gaps=True)),
    ],
)
def test_budgets_are_completed_by_the_servers(given, default, sparse):
    assert parse_cache_field(given).options(None, CacheOptions(sparse=default)).sparse == sparse


@pytest.mark.parametrize(
    ("value", "parameter"),
    [
        ({"mode": "fast"}, "cache.mode"),
        ({"position_strategy": "x"}, "cache.position_strategy"),
        ({"scope": "global"}, "cache.scope"),
        ({"namespace": ""}, "cache.namespace"),
        ({"namespace": "n" * 129}, "cache.namespace"),
        ({"explain": "perhaps"}, "cache.explain"),
        *(
            ({"sparse": {name: 0}}, f"cache.sparse.{name}")
            for name in ("budget_tokens", "budget_share", "budget", "gaps")
        ),
        ({"sparse": {"mass": 1.5}}, "cache.sparse.mass"),
        ({"modus": "auto"}, "cache.modus"),
        ("auto", "cache"),
    ],
)
def test_an_error_names_the_field(value, parameter):
    with refused(parameter):
        parse_cache_field(value)
