# SPDX-License-Identifier: Apache-2.0
"""Chunks that together exceed the positions that the model was trained for (strategy `window`)."""

import itertools
from pathlib import Path
from typing import Any

import pytest

from app.models.random_model import build_random_model
from tests.engine.conftest import arguments_of
from tests.engine.server import ServerPool, TesseraServer
from tests.oracle import Oracle
from tests.support.exactness import STEPS, ask, assert_exact, statuses

pytestmark = pytest.mark.matrix

TRAINED, WINDOW = 512, 256
POSITIONS = f"window-{WINDOW}"
"""The oracle's name of them."""
FLAGS = ("--max-model-len", "4096", "--chunk-mode", "window", "--block-size", "32")
LENGTHS = (180, 250, 90, 254, 130, 60, 200, 240)
"""Together three times what the model was trained for."""


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model for 512 positions."""
    return build_random_model(tmp_path_factory.mktemp("models") / "short", max_position_embeddings=TRAINED)


@pytest.fixture(scope="module", params=["copy", "attend"])
def windowed(request: pytest.FixtureRequest, pool: ServerPool, short: Path) -> TesseraServer:
    return pool.get(*arguments_of(short), *FLAGS, "--chunk-cache-placement", request.param)


@pytest.fixture(scope="module")
def reference(short: Path) -> Oracle:
    return Oracle(short)


def answer(server: TesseraServer, chunks: list[str], question: str, **fields: Any) -> dict[str, Any]:
    return ask(server, "window", chunks, question, **fields)


def test_all_lengths_and_orders_are_exact(windowed, reference, text):
    chunks = [text(length) for length in LENGTHS]
    for number in (1, 2, 3, 5, 8):
        response = answer(windowed, chunks[:number], text(20))
        assert_exact(response, reference, POSITIONS)
    for order in itertools.islice(itertools.permutations(chunks), 0, 40_000, 9_000):
        response = answer(windowed, list(order), text(15), cache={"scope": "system"})
        assert statuses(response) == ["hit"] * len(chunks)
        assert_exact(response, reference, POSITIONS)
    response = answer(windowed, [*chunks[3:], text(100)], text(9), system="", cache={"scope": "isolated"})
    assert_exact(response, reference, POSITIONS)


def test_a_long_document_is_split_into_chunks_within_the_window(windowed, reference, text):
    long = text(900)
    response = answer(windowed, [long], text(20))
    assert len(response["cache"]["chunks"]) == 4
    assert_exact(response, reference, POSITIONS)
    given = {"filename": "a.txt", "max_tokens": 4096}
    split = windowed.client.post("/v1/rag/split", params=given, content=long.encode()).json()["chunks"]
    assert WINDOW // 2 < max(chunk["tokens"] for chunk in split) <= WINDOW


def test_prompts_and_answers_stay_within_the_trained_positions(windowed, text):
    chunks = [text(length) for length in LENGTHS]
    for cache in ({"mode": "full"}, {"position_strategy": "offset"}):
        body = {"chunks": chunks, "question": "?", "max_tokens": 4}
        refused = windowed.post("/v1/rag/chat", {**body, "cache": {"position_strategy": "window", **cache}}, status=400)
        assert f"the model was trained for {TRAINED}" in refused["error"]["message"]
    refused = windowed.post("/v1/completions", {"prompt": text(600), "max_tokens": 4}, status=400)
    assert f"the model was trained for {TRAINED}" in refused["error"]["message"]
    prompt = text(TRAINED - 20)
    body = {"prompt": prompt, "max_tokens": 100, "ignore_eos": True, "temperature": 0}
    usage = windowed.post("/v1/completions", body)["usage"]
    assert usage["total_tokens"] == TRAINED
    response = answer(windowed, [text(length) for length in LENGTHS], text(20), max_tokens=1000)
    report = response["cache"]
    system, *chunks, question = (len(segment["token_ids"]) for segment in report["segments"])
    reach = max(WINDOW, *chunks) + system + question
    assert reach + response["usage"]["completion_tokens"] == TRAINED
    assert response["usage"]["total_tokens"] > 2 * TRAINED + STEPS
