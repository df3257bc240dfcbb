# SPDX-License-Identifier: Apache-2.0
"""A run's folder: results survive anything, and stay apart from those of other settings."""

import json
from contextlib import closing

import pytest

from measuring.kit.folder import FolderError
from measuring.quality.results import ResultsFolder
from tests.measuring.quality.helpers import make_question, make_report, make_result, make_settings


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


def test_results_are_there_again(path):
    assert list(reopened(path).results.values()) == [make_result("full"), make_result("shared")]


def test_a_result_is_in_the_file_at_once(tmp_path):
    with closing(ResultsFolder(tmp_path, make_settings())) as folder:
        folder.append(make_result("full"))
        (line,) = (tmp_path / "results.jsonl").read_text().splitlines()
    assert json.loads(line) == {
        "question": "1",
        "mode": "full",
        "chunks": 1,
        "answers": ["Riga"],
        "kind": None,
        "text": "In Riga.",
        "logprob": None,
        "top_logprobs": [],
        "ttft_s": 0.5,
        "total_s": 1.0,
        "cache": make_report("full"),
        "error": None,
    }


def test_the_run_is_described(path):
    assert json.loads((path / "run.json").read_text()) == make_settings().model_dump(mode="json")


@pytest.mark.parametrize("torn", ['{"question": "2", "mo', "\x00\x00", "é"])
def test_a_torn_last_line_is_dropped(path, torn, capsys):
    file = path / "results.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole + torn.encode()[:-1] + b"\xc3")
    assert len(reopened(path).results) == 2
    assert file.read_bytes() == whole
    assert capsys.readouterr().err == f"tessera: {file}: dropped the last line, which was torn\n"


def test_a_file_of_nothing_but_a_torn_line(path):
    (path / "results.jsonl").write_text('{"quest')
    assert reopened(path).results == {}


def test_a_line_that_is_no_result_is_not_passed_over(path):
    file = path / "results.jsonl"
    file.write_text("{}\n" + file.read_text())
    with pytest.raises(FolderError, match=r"results\.jsonl, line 1: isn't a record; give another --output, or --over"):
        reopened(path)


def test_a_refused_question_is_asked_again_and_the_last_result_counts(tmp_path):
    with closing(ResultsFolder(tmp_path, make_settings())) as folder:
        folder.append(make_result("full", cache=None, error="too long"))
        assert folder.answered() == set()
        folder.append(make_result("full"))
        assert folder.answered() == {("1", "full")}
    assert list(reopened(tmp_path).results.values()) == [make_result("full")]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_tokens": 32}, "max_tokens was 64, is 32"),
        ({"modes": ("full",)}, r"modes was \('full', 'shared'\), is \('full',\)"),
        ({"questions_sha256": "cd"}, "questions_sha256 was 'ab', is 'cd'"),
        ({"served_model": "n"}, "served_model was 'm', is 'n'"),
        ({"server_arguments": ("--dtype", "float32")}, r"server_arguments was \(\), is \('--dtype', 'float32'\)"),
        ({"vllm": "1", "concurrency": 2}, "concurrency was 1, is 2; vllm was '0.32.0', is '1'"),
    ],
)
def test_other_settings_are_refused_by_name(path, change, words):
    with pytest.raises(FolderError, match=rf"has results of another run: {words}\. give another --output, or --over"):
        reopened(path, **change)
    assert len(reopened(path).results) == 2


def test_overwriting_drops_what_was_there(path):
    (path / "summary.json").write_text("{}")
    (path / "notes.txt").write_text("mine")
    assert reopened(path, overwrite=True, max_tokens=32).results == {}
    assert sorted(file.name for file in path.iterdir()) == ["notes.txt", "results.jsonl", "run.json"]


def test_results_of_who_knows_what(path):
    (path / "run.json").unlink()
    with pytest.raises(FolderError, match=r"has results, but no run\.json says of what; give another --output"):
        reopened(path)


@pytest.mark.parametrize("content", ["", "{}", '{"questions": 1}', "[]"])
def test_a_description_that_is_none(path, content):
    (path / "run.json").write_text(content)
    with pytest.raises(FolderError, match=r"run\.json isn't a run's description"):
        reopened(path)


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_file_in_the_folders_place(tmp_path, overwrite):
    (tmp_path / "run").touch()
    with pytest.raises(FolderError, match=r"run(/.*)?: (File exists|Not a directory)"):
        reopened(tmp_path / "run", overwrite)


@pytest.mark.parametrize(("mode", "ran_as"), [("full", "full"), ("shared", "shared"), ("offset", "offset")])
def test_the_mode_a_request_ran_in(mode, ran_as):
    assert make_result("shared", cache=make_report(mode)).ran_as == ran_as
    assert make_result("shared", cache=None).ran_as is None


def test_a_result_knows_what_was_asked():
    question = make_question("q", "One.", "Two.", answers=("a", "b"))
    result = type(make_result()).of_error(question, "offset", "too long")
    assert (result.key, result.chunks, result.answers, result.error) == (("q", "offset"), 2, ("a", "b"), "too long")
