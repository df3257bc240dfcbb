#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Print each package's size, function lengths, and attribute chains through other objects.

A chain is an attribute access with two or more dots into an object that was not imported: request.app.state, or
self.engine.llm.model, where the dot after self (or cls) is free. Each chain counts once, whatever its length.

Lines are all lines of the files. The length of a function, nested ones and methods included, runs from its def to its
last line; 95 % of the functions are at most as long as the second figure says.

    python3 scripts/chains.py [FOLDER ...]

Without folders: the packages that pyproject.toml lists for mypy.
"""

import argparse
import ast
import math
import statistics
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
HEADER = ("package", "lines / files", "functions: median / 95 % / longest", "chains per 1,000 lines")


@dataclass(frozen=True, slots=True)
class Measures:
    """The figures of one package."""

    num_lines: int
    num_files: int
    function_lengths: tuple[int, ...]
    """Ascending."""
    num_chains: int

    @property
    def chains_per_1000_lines(self) -> float:
        return 1000 * self.num_chains / max(self.num_lines, 1)

    def row(self, name: str) -> tuple[str, ...]:
        """The package's cells in the table."""
        lengths = self.function_lengths or (0,)
        longest_of_95_percent = lengths[math.ceil(0.95 * len(lengths)) - 1]
        return (
            name,
            f"{self.num_lines / 1000:.1f}k / {self.num_files}",
            f"{statistics.median(lengths):g} / {longest_of_95_percent} / {lengths[-1]}",
            f"{self.chains_per_1000_lines:.1f}",
        )


def measure(folder: Path) -> Measures:
    """Measures all Python files in a folder and below."""
    sources = [path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.py"))]
    trees = [ast.parse(source) for source in sources]
    return Measures(
        sum(len(source.splitlines()) for source in sources),
        len(sources),
        tuple(sorted(length for tree in trees for length in function_lengths(tree))),
        sum(len(chains(tree)) for tree in trees),
    )


def function_lengths(tree: ast.Module) -> list[int]:
    """Lines of each function in a module, from its def to its last line."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [(node.end_lineno or node.lineno) - node.lineno + 1 for node in functions]


def chains(tree: ast.Module) -> list[str]:
    """Attribute chains of a module through objects that it does not import, as source text."""
    imported = {
        alias.asname or alias.name.partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    inner = {id(node.value) for node in attributes}
    return [ast.unparse(node) for node in attributes if id(node) not in inner and _num_dots(node, imported) >= 2]


def _num_dots(node: ast.expr, imported: set[str]) -> int:
    """Count the dots into another object; 0 if the chain starts at an import."""
    dots = 0
    while isinstance(node, ast.Attribute):
        dots, node = dots + 1, node.value
    if not isinstance(node, ast.Name) or node.id in imported:
        return 0
    return dots - (node.id in ("self", "cls"))


def packages() -> list[str]:
    """The packages of the project, as its pyproject.toml lists them for mypy."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return list(project["tool"]["mypy"]["packages"])


def table(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [" | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    lines.insert(1, " | ".join("-" * width for width in widths))
    return "\n".join(f"| {line} |" for line in lines)


def main(arguments: Sequence[str]) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", help="default: the project's packages", metavar="FOLDER")
    folders = parser.parse_args(arguments).folders or packages()
    print(table([HEADER, *(measure(ROOT / folder).row(folder) for folder in folders)]))


if __name__ == "__main__":
    main(sys.argv[1:])
