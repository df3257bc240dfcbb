# SPDX-License-Identifier: Apache-2.0
"""Context variables, as a request sets them."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")


@contextmanager
def having(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Sets a variable for the block."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
