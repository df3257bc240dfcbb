# SPDX-License-Identifier: Apache-2.0
"""Helpers for fuzzers: arbitrary JSON, and a time limit."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hypothesis import strategies as st

HANGS_S = 60

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([-1, 2**31, 2**63, 2**64, 10**400])
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["", " ", "\ud800", "a\r\nb: c", "\x00", "x" * 1000])
)
json_values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
)


def perhaps(good: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Mostly valid values, so that later checks are reached, too."""
    return st.one_of(good, good, good, json_values)


def objects(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Objects with some of these fields."""
    return st.fixed_dictionaries({}, optional=fields)


@contextmanager
def ends() -> Iterator[None]:
    """Fails if the block hangs."""

    def give_up(*_: object) -> None:
        raise AssertionError(f"it has not ended after {HANGS_S} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(HANGS_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
