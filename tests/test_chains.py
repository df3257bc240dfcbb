# SPDX-License-Identifier: Apache-2.0
"""scripts/chains.py: its counting on a small example, and its table of this project."""

import ast
import subprocess
import sys

import pytest

from scripts.chains import ROOT, chains, measure, packages

EXAMPLE = '''"""Attribute chains, of which four go through other objects."""

import os
from app import state as known


class Reader:
    def read(self, request):
        request.app.state.engine.run()  # counts once
        self.engine.llm.run()  # counts: the dot after self is free
        self.engine.run()
        os.path.sep.join([])
        known.a.b.c()
        return request.app.state, [self.cache.pages[0].owner]

    @classmethod
    def made(cls, x):
        def inner():
            return x.a.b

        return inner().c.d
'''


def test_chains_go_through_objects_that_were_not_imported():
    assert sorted(chains(ast.parse(EXAMPLE))) == [
        "request.app.state",
        "request.app.state.engine.run",
        "self.engine.llm.run",
        "x.a.b",
    ]


@pytest.mark.parametrize(
    ("code", "count"),
    [
        ("a.b", 0),
        ("a.b.c", 1),
        ("a.b.c.d.e", 1),
        ("self.a.b", 0),
        ("self.a.b.c", 1),
        ("cls.a.b", 0),
        ("import a\na.b.c", 0),
        ("import a.x\na.b.c", 0),
        ("import x as a\na.b.c", 0),
        ("from x import a\na.b.c", 0),
        ("a.b.c = a.d.e", 2),
        ("a.b().c.d", 0),
        ("f(a.b.c).d.e", 1),
    ],
)
def test_each_chain_counts_once(code, count):
    assert len(chains(ast.parse(code))) == count


def test_a_folder_is_measured_with_all_its_files(tmp_path):
    (tmp_path / "room").mkdir()
    (tmp_path / "reader.py").write_text(EXAMPLE)
    (tmp_path / "room" / "one.py").write_text("def f(x):\n    return x.a.b\n")
    measures = measure(tmp_path)
    assert measures.function_lengths == (2, 2, 5, 7)
    assert (measures.num_lines, measures.num_files, measures.num_chains) == (23, 2, 5)
    assert measures.row("p") == ("p", "0.0k / 2", "3.5 / 7 / 7", "217.4")


def test_the_table_has_a_row_for_each_package():
    ran = subprocess.run(
        [sys.executable, "scripts/chains.py"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert [line.split()[1] for line in ran[2:]] == packages()
    assert {line.count("|") for line in ran} == {5}


@pytest.mark.parametrize("package", packages())
def test_few_chains_go_through_other_objects(package):
    assert measure(ROOT / package).chains_per_1000_lines <= 12
