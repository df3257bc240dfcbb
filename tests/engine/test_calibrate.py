# SPDX-License-Identifier: Apache-2.0
"""`tessera calibrate` on real models, and servers with its profile."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from app.models.demo_model import DEMO_MODEL
from app.profile import Profile
from engine_ext.start.weights import files_digest
from measuring.quality.calibration import LEAST_ANSWERS
from measuring.quality.calibration import main as calibrate
from measuring.quality.metrics import normalize
from measuring.quality.questions.demo import demo_questions
from tests.engine.conftest import COMMON
from tests.engine.server import TesseraServer

pytestmark = pytest.mark.matrix

TO_SERVE = ("--", "--dtype", "float32", *COMMON)


def calibrated(folder: Path, *arguments: str) -> tuple[Profile, Path]:
    assert calibrate([*arguments, "--output", str(folder), *TO_SERVE]) == 0
    path = folder / "profile.json"
    return Profile.read(path), path


def question_file(folder: Path, records: list[dict[str, Any]]) -> str:
    path = folder / "questions.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@pytest.fixture(scope="module")
def of_demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Profile, Path]:
    """Thirty questions for each of two numbers of chunks, so that a single answer does not decide."""
    folder = tmp_path_factory.mktemp("demo")
    records = [asdict(question) for question in demo_questions(LEAST_ANSWERS, numbers=(2, 4))]
    questions = question_file(folder, [{**each, "chunks": [c["text"] for c in each["chunks"]]} for each in records])
    chosen = ("--questions", questions, "--modes", "full,shared", "--tolerance", "7")
    return calibrated(folder / "out", str(DEMO_MODEL), *chosen)


def test_the_demo_model_reuses_chunks(of_demo):
    """tests/engine/test_real_weights.py has a server that follows such a profile."""
    profile, _ = of_demo
    assert profile.trained_for == ("full", "shared", "offset")
    assert profile.weights == files_digest(DEMO_MODEL)
    assert [(kind.max_chunks, kind.mode) for kind in profile.kinds] == [(2, "shared"), (4, "shared")]


def asked(server: TesseraServer, chunks: list[str], **cache: Any) -> dict[str, Any]:
    return server.chat(chunks=chunks, question="?", max_tokens=2, temperature=0, cache=cache)["cache"]


@pytest.fixture(scope="module")
def of_random_weights(serve, model_path, tmp_path_factory) -> tuple[Profile, Path]:
    """Expected answers are the model's own in full attention, so that any other answer counts as a loss."""
    server, folder, records = serve("tiny-llama"), tmp_path_factory.mktemp("random"), []
    for number in range(LEAST_ANSWERS + 10):
        chunks = [f"{number} {letter} {i * number}" * 5 for i, letter in enumerate("mnopqrs"[:2])]
        fields = {"chunks": chunks, "question": f"What of {number}?"}
        said = server.chat(**fields, max_tokens=12, temperature=0, cache={"mode": "full"})
        answer = said["choices"][0]["message"]["content"]
        if normalize(answer):
            records.append({**fields, "answers": [answer]})
    chosen = ("--questions", question_file(folder, records), "--modes", "full,shared,offset+15%", "--max-tokens", "12")
    return calibrated(folder / "out", str(model_path("tiny-llama")), *chosen)


def test_a_model_that_isolation_breaks_keeps_full_attention(of_random_weights, serve):
    profile, path = of_random_weights
    (kind,) = profile.kinds
    full, *others = kind.measured
    assert (kind.mode, full.accuracy.mean) == ("full", 1)
    assert all(each.accuracy.mean < 0.7 for each in others), others
    server = serve("tiny-llama", "--profile", str(path))
    report = asked(server, ["One.", "Two."])
    assert (report["mode"], report["decision"]["mode"]) == ("full", "full")
    assert report["reason"] == "the profile has full for up to 2 chunks"
    assert asked(server, ["One."])["mode"] == "chunked"
    for wish in ({"position_strategy": "shared"}, {"mode": "chunked"}, {"recompute": 0.1}, {"scope": "isolated"}):
        report = asked(server, ["One.", "Two."], **wish)
        assert (report["mode"], "decision" in report) == ("chunked", False)


def test_a_profile_of_another_model_is_refused(of_demo, serve):
    _, path = of_demo
    with pytest.raises(RuntimeError, match=r"server exited with 2:(.|\n)*which has other weights than this model\n"):
        serve("tiny-llama", "--profile", str(path))
