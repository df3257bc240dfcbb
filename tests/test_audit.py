# SPDX-License-Identifier: Apache-2.0
"""scripts/audit.py, with real output of pip-audit and cyclonedx-py."""

import json
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
        monkeypatch.setattr(audit, "list_installed", lambda path: None)
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


def test_without_a_network(tmp_path, monkeypatch):
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    requirements = tmp_path / "requirements.txt"
    requirements.write_text("requests==2.19.0\n")
    flags = ["-r", str(requirements), "--no-deps", "--disable-pip"]
    assert audit.look_up(tmp_path / "audit.json", flags) == []


def test_other_failures_are_not_taken_for_that(tmp_path):
    with pytest.raises(SystemExit, match="unrecognized arguments: --no-such-flag"):
        audit.look_up(tmp_path / "audit.json", ["--no-such-flag"])


def test_the_bill_of_materials_names_what_is_installed(tmp_path):
    audit.list_installed(tmp_path / "sbom.json")
    bill = json.loads((tmp_path / "sbom.json").read_text())
    assert bill["metadata"]["component"]["name"] == "tessera-rag"
    names = {component["name"] for component in bill["components"]}
    assert {"torch", "transformers", "fastapi"} <= names
