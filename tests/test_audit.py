# SPDX-License-Identifier: Apache-2.0
"""scripts/audit.py, its tools simulated."""

import sys

import pytest

from scripts import audit

FLAW = {"id": "PYSEC-2018-28", "fix_versions": ["2.20.0"], "aliases": ["CVE-2018-18074"], "description": "…"}
BAD = {"name": "requests", "version": "2.19.0", "vulns": [FLAW]}
GOOD = {"name": "torch", "version": "2.13.0", "vulns": []}
SKIPPED = {"name": "local", "skip_reason": "Dependency not found on PyPI"}


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs the script with a pip-audit that lists these packages; returns status and output."""

    def run_script(packages):
        monkeypatch.setattr(audit, "look_up", lambda path, flags: packages)
        monkeypatch.setattr(audit, "list_installed", lambda environment, path: None)
        monkeypatch.setattr(sys, "argv", ["audit.py", "--output", str(tmp_path / "new")])
        return audit.main(), capsys.readouterr().out.splitlines()

    return run_script


def test_a_vulnerability_is_told_and_fails(run):
    status, lines = run([GOOD, BAD, SKIPPED])
    assert status == 1
    assert lines == [
        "requests 2.19.0: PYSEC-2018-28, fixed in 2.20.0",
        "audit: known vulnerabilities: 1, in 2 packages; 1 could not be looked up",
    ]


def test_what_could_not_be_looked_up_is_not_called_good(run):
    assert run([SKIPPED]) == (0, ["audit: known vulnerabilities: 0, in 0 packages; 1 could not be looked up"])
    assert run([]) == (0, ["audit: nothing could be looked up: no connection to PyPI"])


@pytest.mark.parametrize("words", ["ConnectionError: https://pypi.org", "Could not connect to PyPI"])
def test_without_a_network_nothing_is_looked_up(tmp_path, monkeypatch, words):
    monkeypatch.setattr(audit.sys, "executable", failing(tmp_path, words))
    assert audit.look_up(tmp_path / "audit.json", []) == []


def test_other_failures_are_not_taken_for_that(tmp_path, monkeypatch):
    monkeypatch.setattr(audit.sys, "executable", failing(tmp_path, "unrecognized arguments: --no-such-flag"))
    with pytest.raises(SystemExit, match="unrecognized arguments: --no-such-flag"):
        audit.look_up(tmp_path / "audit.json", ["--no-such-flag"])


def failing(folder, words):
    """A program that prints `words` as an error and fails."""
    program = folder / "program"
    program.write_text(f"#!/bin/sh\necho '{words}' >&2\nexit 1\n")
    program.chmod(0o755)
    return str(program)
