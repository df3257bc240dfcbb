# SPDX-License-Identifier: Apache-2.0
"""A run's folder: results survive anything, and stay apart from those of other settings."""

from contextlib import closing

import pytest

from measuring.kit.folder import FolderError
from measuring.quality.results import ResultsFolder
from tests.measuring.quality.helpers import make_result, make_settings


@pytest.fixture
def path(tmp_path):
    """A folder with two results in it."""
    path = tmp_path / "a" / "run"
    with closing(ResultsFolder(path, make_settings())) as folder:
        folder.append(make_result("full"))
        folder.append(make_result("shared"))
    return path


def reopened(path, overwrite=False, **settings) -> ResultsFolder:
    folder = ResultsFolder(path, make_settings(**settings), overwrite)
    folder.close()
    return folder


@pytest.mark.parametrize("torn", ['{"question": "2", "mo', "\x00\x00", "é"])
def test_a_torn_last_line_is_dropped(path, torn, capsys):
    file = path / "results.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole + torn.encode()[:-1] + b"\xc3")
    assert list(reopened(path).results.values()) == [make_result("full"), make_result("shared")]
    assert file.read_bytes() == whole
    assert capsys.readouterr().err == f"tessera: {file}: dropped the last line, which was torn\n"
    file.write_text(torn)
    assert reopened(path).results == {}


def test_a_line_that_is_no_result_is_not_passed_over(path):
    file = path / "results.jsonl"
    file.write_text("{}\n" + file.read_text())
    with pytest.raises(FolderError, match=r"results\.jsonl, line 1: isn't a record; give another --output, or --over"):
        reopened(path)


def test_overwriting_drops_what_was_there(path):
    (path / "summary.json").write_text("{}")
    (path / "notes.txt").write_text("mine")
    assert reopened(path, overwrite=True, max_tokens=32).results == {}
    assert sorted(file.name for file in path.iterdir()) == ["notes.txt", "results.jsonl", "run.json"]


def test_results_of_who_knows_what(path):
    (path / "run.json").write_text('{"questions": 1}')
    with pytest.raises(FolderError, match=r"run\.json isn't a run's description"):
        reopened(path)
    (path / "run.json").unlink()
    with pytest.raises(FolderError, match=r"has results, but no run\.json says of what; give another --output"):
        reopened(path)
