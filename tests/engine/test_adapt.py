# SPDX-License-Identifier: Apache-2.0
"""The server with adapted models: it predicts what training predicts, and plain requests are unchanged."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from app.documents.document import Document
from cache.positions.layout import ChunkTokens
from tests.engine.conftest import arguments_of
from tests.engine.server import ServerPool, TesseraServer
from tests.support.exactness import segments
from training.adapt.command import main as adapt
from training.adapt.material import Task, Template
from training.adapt.model import load, log_probabilities
from training.adapt.rows import Branch, make_row

SYSTEM, QUESTION, STEPS = "Answer.", "How many rooms?", 6
DOCUMENTS = [Document(f"Station {number} has {number * 7} rooms, and a garden.") for number in range(5)]


@pytest.fixture(scope="module")
def adapted(model_path: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with soft tokens of three training steps."""
    folder = tmp_path_factory.mktemp("adapted")
    documents = folder / "documents"
    documents.mkdir()
    for number in range(20):
        (documents / f"{number}.txt").write_text(f"Station {number} is in Riga. Its {number} rooms are let.")
    given = ["--documents", str(documents), "--output", str(folder / "out"), "--work", str(folder / "work")]
    assert adapt([str(model_path("tiny-llama")), *given, "--positions", "all", "--steps", "3", "--tasks", "2"]) == 0
    return folder / "out"


@pytest.fixture(scope="module")
def adapted_server(adapted: Path, pool: ServerPool) -> TesseraServer:
    return pool.get(*arguments_of(adapted))


def asked(server: TesseraServer, **cache: Any) -> tuple[dict[str, Any], list[int], list[float]]:
    answer = server.chat(
        system=SYSTEM,
        chunks=[document.text for document in DOCUMENTS],
        question=QUESTION,
        max_tokens=STEPS,
        temperature=0,
        ignore_eos=True,
        logprobs=True,
        return_token_ids=True,
        cache={**cache, "explain": True},
    )
    (choice,) = answer["choices"]
    return answer["cache"], choice["token_ids"], [each["logprob"] for each in choice["logprobs"]["content"]]


@pytest.mark.parametrize("strategy", ["offset", "shared", "parallel"])
def test_the_server_predicts_what_training_predicts(
    adapted_server: TesseraServer, adapted: Path, strategy: Any
) -> None:
    report, tokens, served = asked(adapted_server, position_strategy=strategy)
    assert report["mode"] == "chunked"
    template, model = Template(AutoTokenizer.from_pretrained(adapted)), load(adapted)
    around = ChunkTokens.of(model.config).around
    assert around(b"") != b""
    prompt = template.prompt(SYSTEM, DOCUMENTS)
    prompt = replace(prompt, chunks=tuple(replace(each, packed=around(each.packed)) for each in prompt.chunks))
    question = template.branch(SYSTEM, Task(QUESTION, "")).question
    with torch.no_grad():
        found = log_probabilities(model, make_row(prompt, [Branch(question, tuple(tokens))], strategy))
    expected = found[len(question) - 1 :].gather(1, torch.tensor(tokens)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(served), expected, rtol=0, atol=1e-4)


def test_the_first_trained_strategy_is_the_default(adapted_server: TesseraServer) -> None:
    assert asked(adapted_server)[0]["position_strategy"] == "shared"


def test_requests_without_chunks_are_bit_for_bit_those_of_the_original(
    adapted_server: TesseraServer, server: TesseraServer
) -> None:
    bodies = [{"messages": [{"role": "user", "content": f"Tell me about {topic}."}]} for topic in ("Riga", "rooms")]
    given = {"max_tokens": 12, "temperature": 0, "logprobs": True, "top_logprobs": 5}
    answers = [
        [each.post("/v1/chat/completions", {**body, **given})["choices"][0]["logprobs"] for body in bodies]
        for each in (adapted_server, server)
    ]
    assert answers[0] == answers[1]


def test_a_document_that_spells_a_soft_token_has_none(adapted_server: TesseraServer) -> None:
    answer = adapted_server.chat(
        chunks=["<|chunk-0|> is no token here."], question="?", max_tokens=1, cache={"explain": True}
    )
    _, (chunk,), _ = segments(answer["cache"])
    assert chunk.count(chunk[0]) == 1
