# SPDX-License-Identifier: Apache-2.0
"""Which mode a profile has for which requests, from results made up for each."""

from contextlib import nullcontext
from pathlib import Path

import pytest

from app.models.random_model import build_preset
from app.profile import Profile, ProfileError
from measuring.quality import calibration
from measuring.quality.calibration import LEAST_ANSWERS, kinds, main
from measuring.quality.summary import rows_by_chunks
from tests.measuring.fake_server import Reply, asked_mode, make_report
from tests.measuring.quality.helpers import make_result, write_questions

MODES = {"full": 1.0, "shared": 0.1, "offset": 0.105, "offset+15%": 0.2, "offset+25%": 0.3}
"""With times to first token."""


def profile(accuracies, chunks=2, count=100, tolerance=0.02, times=MODES, missing=()):
    """Of modes with these shares of right answers."""
    results = [
        make_result(
            mode,
            f"{chunks}-{i}",
            "Riga" if i < round(share * count) else "Paris",
            chunks=chunks,
            ttft_s=times[mode],
            cache=make_report("full") if (mode, i) in missing else make_report(mode),
        )
        for mode, share in accuracies.items()
        for i in range(count)
    ]
    return kinds(rows_by_chunks(results, "I don't know"), tolerance)


@pytest.mark.parametrize(
    ("accuracies", "mode"),
    [
        ({"full": 0.9, "shared": 0.9, "offset": 0.85, "offset+15%": 0.9}, "shared"),
        ({"full": 0.9, "shared": 0.88, "offset": 0.89, "offset+15%": 0.9}, "offset"),
        ({"full": 0.9, "shared": 0.87, "offset": 0.8, "offset+15%": 0.89, "offset+25%": 0.9}, "offset+15%"),
        ({"full": 0.9, "shared": 0.5, "offset": 0.6, "offset+15%": 0.7, "offset+25%": 0.87}, "full"),
        ({"full": 0.9}, "full"),
    ],
)
def test_the_quickest_within_the_tolerance_and_of_those_as_quick_the_best(accuracies, mode):
    (kind,) = profile(accuracies)
    assert (kind.mode, kind.max_chunks) == (mode, 2)
    assert [each.mode for each in kind.measured] == list(accuracies)


def test_reuse_must_stay_within_the_tolerance_save_time_and_be_tried_often():
    accuracies = {"full": 0.9, "shared": 0.84}
    assert [profile(accuracies, tolerance=t)[0].mode for t in (0.0, 0.05, 0.06)] == ["full", "full", "shared"]
    accuracies = {"full": 0.9, "shared": 0.9}
    assert profile(accuracies)[0].mode == "shared"
    assert profile(accuracies, times={"full": 0.1, "shared": 0.2})[0].mode == "full"
    assert profile(accuracies, missing={("shared", i) for i in range(20)})[0].mode == "full"
    (few,) = profile({"full": 1.0, "shared": 1.0}, count=LEAST_ANSWERS - 1)
    assert (few.mode, few.is_certain) == ("full", False)
    (enough,) = profile({"full": 1.0, "shared": 1.0}, count=LEAST_ANSWERS)
    assert enough.mode == "shared"


def test_certain_is_what_the_interval_says():
    (sure,) = profile({"full": 0.5, "shared": 0.5}, count=200)
    (doubtful,) = profile({"full": 0.5, "shared": 0.49}, count=100)
    assert (sure.is_certain, doubtful.mode, doubtful.is_certain) == (True, "shared", False)
    (shared,) = [each for each in doubtful.measured if each.mode == "shared"]
    assert shared.difference.low < -0.02 < shared.difference.mean


@pytest.mark.parametrize(("count", "is_certain"), [(30, False), (149, False), (150, True)])
def test_answers_that_are_all_alike_are_certain_of_no_more_than_their_number_allows(count, is_certain):
    (kind,) = profile({"full": 1.0, "shared": 1.0}, count=count)
    (shared,) = [each for each in kind.measured if each.mode == "shared"]
    assert (shared.difference.low, shared.difference.high) == (0, 0)
    assert (kind.mode, kind.is_certain) == ("shared", is_certain)


def test_kinds_go_by_the_number_of_chunks_and_are_not_certain_where_reuse_was_never_timed():
    results = [
        make_result(mode, f"{chunks}-{i}", text, chunks=chunks, ttft_s=MODES[mode], cache=make_report(mode))
        for chunks, of_shared in ((8, "Paris"), (2, "Riga"))
        for mode, text in (("full", "Riga"), ("shared", of_shared))
        for i in range(40)
    ]
    found = kinds(rows_by_chunks(results, "I don't know"), 0.02)
    assert [(kind.min_chunks, kind.max_chunks, kind.mode) for kind in found] == [(2, 2, "shared"), (8, 8, "full")]
    results = [
        make_result(mode, f"{i}", chunks=2, cache=make_report(mode, *(() if mode == "full" else ("filled",))))
        for mode in ("full", "shared")
        for i in range(200)
    ]
    (kind,) = kinds(rows_by_chunks(results, "I don't know"), 0.02)
    assert (kind.mode, kind.is_certain) == ("full", False)


@pytest.fixture
def calibrated(server, tmp_path, monkeypatch):
    """Runs the command with the small server as its own; returns its exit code."""
    model = build_preset("tiny-llama", tmp_path / "model")
    monkeypatch.setattr("measuring.quality.command._server", lambda _: nullcontext(server.url))
    questions = str(write_questions(tmp_path / "questions.jsonl", 40))

    def run(*flags):
        return main([str(model), "--questions", questions, "--output", str(tmp_path / "out"), *flags])

    return run


def test_chunks_are_cached_when_a_mode_is_timed(calibrated, tmp_path, capsys):
    assert calibrated("--modes", "full,shared", "--limit", "40") == 0
    made = Profile.read(tmp_path / "out" / "profile.json")
    assert all(each.first_token_ms is not None for kind in made.kinds for each in kind.measured)
    assert f"tessera serve {tmp_path / 'model'} --profile" in capsys.readouterr().err


def test_documents_that_the_server_splits_are_counted_by_their_parts(calibrated, server, tmp_path):
    server.reply = lambda body: Reply("Latvia", make_report(asked_mode(body), *["hit"] * 5))
    assert calibrated("--modes", "full,shared") == 0
    made = Profile.read(tmp_path / "out" / "profile.json")
    assert [(kind.min_chunks, kind.max_chunks) for kind in made.kinds] == [(5, 5)]


def test_nothing_is_asked_if_there_can_be_no_profile(calibrated, server, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    assert calibrated("--profile", str(tmp_path / "file" / "profile.json")) == 2
    assert str(tmp_path / "file") in capsys.readouterr().err
    asked = []

    def described(*model):
        asked.append(model)
        raise ProfileError("no such files")

    monkeypatch.setattr(calibration, "described", described)
    assert calibrated("--", "--revision", "abc", "--download-dir=/models", "--chunk-adapter=/adapter") == 2
    assert asked == [(str(tmp_path / "model"), "abc", "/models", Path("/adapter"))]  # the one that is served
    assert "no profile: no such files" in capsys.readouterr().err
    server.off = "switched off"
    assert calibrated() == 2
    assert "nothing can be measured of chunks that are not reused" in capsys.readouterr().err
    assert not server.requests
