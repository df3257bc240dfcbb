# SPDX-License-Identifier: Apache-2.0
import subprocess
import sys
from pathlib import Path

import pytest

from tests.selection import lines_changed

ROOT = Path(__file__).parents[1]


def git(folder: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=tests", "-c", "user.email=tests@localhost")
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True)


def test_lines_changed_are_counted_over_commits(tmp_path: Path) -> None:
    git(tmp_path, "init")
    for text in ("a\nb\n", "a\nc\n"):
        (tmp_path / "often.py").write_text(text)
        (tmp_path / "once.py").write_text("a\n")
        git(tmp_path, "add", ".")
        git(tmp_path, "commit", "-m", "change")
    assert lines_changed(tmp_path) == {"often.py": 4, "once.py": 1}


def test_without_a_repository_nothing_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert not lines_changed(tmp_path)


def test_tests_are_skipped_after_the_time_limit() -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--minutes",
        "-1",
        __file__,
        "-k",
        "repository",
    ]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    assert "1 skipped" in shown
    assert "time limit" in shown
