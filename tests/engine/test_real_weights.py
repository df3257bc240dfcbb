# SPDX-License-Identifier: Apache-2.0
"""The server with SmolLM2-135M-Instruct, a real model without training for chunk reuse."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from app.modes import cache_field
from app.profile import Profile
from measuring.quality.calibration import main as calibrate
from measuring.quality.command import main as evaluate
from measuring.quality.questions.plain_english import plain_questions
from measuring.quality.questions.questions import Question
from tests.engine.conftest import COMMON
from tests.engine.server import ServerPool, TesseraServer
from tests.oracle import STRATEGIES, Oracle
from tests.support.exactness import segments

pytestmark = pytest.mark.matrix
STEPS = 16
FLAGS = ("--dtype", "float32", *COMMON, "--max-model-len", "4096")
IN_PLACE = ("--chunk-cache-placement", "in-place", "--block-size", "32")


@pytest.fixture
def serve_smollm2(pool: ServerPool, smollm2: Path) -> Callable[..., TesseraServer]:
    return lambda *flags: pool.get(str(smollm2), *FLAGS, *flags)


@pytest.fixture(scope="module")
def reference(smollm2: Path) -> Oracle:
    torch.set_num_threads(2)
    return Oracle(smollm2)


def ask(server: TesseraServer, question: Question, mode: str) -> dict[str, Any]:
    texts, cache = [chunk.text for chunk in question.chunks], {**cache_field(mode), "explain": True}
    asked = {"system": question.system, "chunks": texts, "question": question.question, "cache": cache}
    return server.chat(**asked, max_tokens=STEPS, temperature=0, ignore_eos=True, return_token_ids=True)


def assert_as_in_transformers(server: TesseraServer, reference: Oracle, questions: list[Question], mode: str) -> None:
    for question in questions:
        answer = ask(server, question, mode)
        assert answer["cache"]["mode"] == ("full" if mode == "full" else "chunked")
        tokens = answer["choices"][0]["token_ids"]
        assert reference.choices(mode, segments(answer["cache"]), tokens) == tokens, question


def some(count: int) -> list[Question]:
    """This many questions each behind 2 and 8 chunks."""
    return [question for question in plain_questions(count) if len(question.chunks) in (2, 8)]


@pytest.mark.parametrize("mode", STRATEGIES)
def test_answers_are_those_of_plain_transformers(mode: str, serve_smollm2: Any, reference: Oracle) -> None:
    assert_as_in_transformers(serve_smollm2(), reference, some(50), mode)


def test_answers_in_place_are_those_of_plain_transformers(serve_smollm2: Any, reference: Oracle) -> None:
    server = serve_smollm2(*IN_PLACE, "--chunk-mode", "parallel")
    assert ask(server, some(1)[0], "parallel")["cache"]["placement"] == "in-place"
    assert_as_in_transformers(server, reference, some(2), "parallel")


def test_requests_that_name_no_strategy_get_offset_positions(serve_smollm2: Any) -> None:
    server = serve_smollm2()
    report = server.chat(chunks=["One.", "Two."], question="What?", max_tokens=1)["cache"]
    assert report["position_strategy"] == server.stats()["position_strategy"] == "offset"
    log = server.log.read_text()
    assert "positions: offset (the model was not trained for chunk reuse; what reuse costs it was not measured" in log


def test_right_answers_have_log_probabilities(smollm2: Path, tmp_path: Path, reference: Oracle) -> None:
    """Answers forced by `tessera eval` have plain transformers' log probabilities."""
    options = ["--limit", "1", "--modes", "full,offset", "--max-tokens", "4", "--output", str(tmp_path)]
    assert evaluate([str(smollm2), *options, "--", *FLAGS]) == 0
    results = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert len(results) == 4 * 2
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    questions = {question.id: question for question in plain_questions(1)}
    for result in results:
        question = questions[result["question"]]
        lead, said = (
            tokenizer(text)["input_ids"] for text in ("The answer is", f"The answer is {question.answers[0]}")
        )
        assert said[: len(lead)] == lead
        texts = [
            f"<|im_start|>system\n{question.system}<|im_end|>\n<|im_start|>user\n",
            *(f"{chunk.text}\n\n" for chunk in question.chunks),
            f"{question.question}<|im_end|>\n<|im_start|>assistant\n",
        ]
        system, *chunks, tail = tokenizer(texts)["input_ids"]
        logprobs = reference.score(result["mode"], (system, chunks, tail), said).logprobs[len(lead) :]
        assert result["logprob"] == pytest.approx(sum(logprobs), abs=1e-3)


def test_a_calibration_is_followed(smollm2: Path, tmp_path: Path, pool: ServerPool) -> None:
    path = tmp_path / "profile.json"
    options = ["--limit", "40", "--modes", "full,shared,parallel,offset", "--output", str(tmp_path / "out")]
    assert calibrate([str(smollm2), *options, "--profile", str(path), "--", *FLAGS]) == 0
    profile = Profile.read(path)
    server = pool.get(str(smollm2), *FLAGS, "--profile", str(path))
    for kind in profile.kinds:
        assert kind.mode != "shared"
        chunks = [f"Fact {i}." for i in range(kind.max_chunks)]
        report = server.chat(chunks=chunks, question="What?", max_tokens=1)["cache"]
        assert report["decision"]["mode"] == kind.mode
