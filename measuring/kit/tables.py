# SPDX-License-Identifier: Apache-2.0
"""Tables of figures."""

from collections.abc import Sequence
from typing import Final

from rich.console import Console
from rich.table import Table

_WIDTH: Final = 170
"""Enough for the widest line."""


def widened(console: Console) -> Console:
    """The console, on which nothing is cut off where there is no terminal that has a width."""
    if not console.is_terminal:
        console.width = _WIDTH
    return console


def new_table(title: str, names: Sequence[str], figures: Sequence[str]) -> Table:
    """A table without rows; its columns are names, and figures beside them."""
    table = Table(title=title, title_justify="left")
    for column in names:
        table.add_column(column, no_wrap=True)
    for column in figures:
        table.add_column(column, justify="right")
    return table
