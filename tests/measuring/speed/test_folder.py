# SPDX-License-Identifier: Apache-2.0
"""The folder of a run: its contents at any time, and refused folders."""

import json
from datetime import UTC, datetime

import pytest

from measuring.kit.folder import FolderError
from measuring.speed.folder import Run, RunFolder, WorkloadRun, read_run
from measuring.speed.samples import Sample

SAMPLE = Sample(workload="context", point="1024", system="warm", round=1, values={"ttft_s": 0.5})


def make_run(**fields):
    return Run(
        **{
            "command": ("tessera", "bench"),
            "model": "m",
            "flags": ("--dtype", "float32"),
            "seed": 0,
            "is_long": False,
            "workloads": {"context": WorkloadRun(title="t", axis="a", sizes={"rounds": 5})},
            "tessera": "0.1.0",
            "cpu": "c",
            "cores": 2,
            "started_at": datetime(2025, 1, 1, tzinfo=UTC),
            **fields,
        }
    )


def test_a_run_is_partial_until_it_is_marked(tmp_path):
    with RunFolder(tmp_path / "a" / "b", make_run()) as folder:
        folder.record(SAMPLE)
        assert read_run(folder.path) == (make_run(), [SAMPLE])
        folder.mark(vllm="0.32.0")
        folder.mark(complete=True)
    run, samples = read_run(folder.path)
    assert (run, samples) == (make_run(vllm="0.32.0", complete=True), [SAMPLE])
    assert folder.num_samples == 1
    assert sorted(file.name for file in folder.path.iterdir()) == ["run.json", "samples.jsonl"]


def test_a_run_is_json_with_plain_names(tmp_path):
    with RunFolder(tmp_path, make_run()) as folder:
        folder.mark(stopped_by="an interruption")
    run = json.loads((tmp_path / "run.json").read_text())
    assert (run["complete"], run["stopped_by"], run["workloads"]["context"]["sizes"]) == (
        False,
        "an interruption",
        {"rounds": 5},
    )


@pytest.mark.parametrize("name", ["run.json", "samples.jsonl"])
def test_a_folder_of_another_run_is_refused_and_left_as_it_is(name, tmp_path):
    (tmp_path / name).write_text("mine")
    with pytest.raises(FolderError, match=f"{name} of another run; give another --output, or --overwrite"):
        RunFolder(tmp_path, make_run())
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [(name, "mine")]


def test_overwriting_removes_the_other_run_and_nothing_else(tmp_path):
    with RunFolder(tmp_path, make_run()) as folder:
        folder.record(SAMPLE)
    for name in ("summary.json", "report.html", "trace.jsonl", "mine.png", "mine.txt"):
        (tmp_path / name).write_text("x")
    with RunFolder(tmp_path, make_run(seed=1), overwrite=True):
        assert read_run(tmp_path) == (make_run(seed=1), [])
    assert sorted(file.name for file in tmp_path.iterdir()) == ["mine.png", "mine.txt", "run.json", "samples.jsonl"]


@pytest.mark.parametrize("content", ["", "[]", '{"workloads": {"../mine": 1}}'])
def test_overwriting_what_is_no_run(content, tmp_path):
    (tmp_path / "run.json").write_text(content)
    with RunFolder(tmp_path, make_run(), overwrite=True):
        assert read_run(tmp_path) == (make_run(), [])


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FolderError, match=r"file/out: Not a directory"):
        RunFolder(tmp_path / "file" / "out", make_run())
