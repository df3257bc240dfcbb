# SPDX-License-Identifier: Apache-2.0
"""The folder of a run: its contents at any time, and refused folders."""

import pytest

from measuring.kit.folder import FolderError
from measuring.speed.folder import RunFolder, read_run
from measuring.speed.samples import Sample
from tests.measuring.helpers import make_run

SAMPLE = Sample(workload="context", point="1024", system="warm", round=1, values={"ttft_s": 0.5})


def test_a_run_is_partial_until_it_is_marked(tmp_path):
    with RunFolder(tmp_path / "a" / "b", make_run()) as folder:
        folder.record(SAMPLE)
        assert read_run(folder.path) == (make_run(), [SAMPLE])
        folder.mark(vllm="0.32.0")
        folder.mark(complete=True)
    assert read_run(folder.path) == (make_run(vllm="0.32.0", complete=True), [SAMPLE])
    assert folder.num_samples == 1
    assert sorted(file.name for file in folder.path.iterdir()) == ["run.json", "samples.jsonl"]


def test_samples_of_another_run_are_left_as_they_are_unless_overwritten(tmp_path):
    (tmp_path / "samples.jsonl").write_text("other's")
    with pytest.raises(FolderError, match=r"samples\.jsonl of another run; give another --output, or --overwrite"):
        RunFolder(tmp_path, make_run())
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("samples.jsonl", "other's")]
    for name in ("run.json", "summary.json", "trace.jsonl", "mine.png", "mine.txt"):
        (tmp_path / name).write_text("x")
    with RunFolder(tmp_path, make_run(seed=1), overwrite=True):
        assert read_run(tmp_path) == (make_run(seed=1), [])
    assert sorted(file.name for file in tmp_path.iterdir()) == ["mine.png", "mine.txt", "run.json", "samples.jsonl"]
