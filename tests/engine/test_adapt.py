# SPDX-License-Identifier: Apache-2.0
"""The server with an adapter of `tessera adapt`: it predicts what training predicts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import set_peft_model_state_dict
from safetensors.torch import load_file
from transformers import AutoTokenizer

from app.documents.document import Document
from tests.engine.conftest import arguments_of
from tests.engine.server import ServerPool, TesseraServer
from training.adapt import trainer
from training.adapt.command import main as adapt
from training.adapt.material import Sample, Task, Template
from training.adapt.model import load, log_probabilities
from training.adapt.rows import Branch, make_row
from training.adapt.student import Student

pytestmark = pytest.mark.matrix

SYSTEM, QUESTION, STEPS = "Answer.", "How many rooms?", 6
DOCUMENTS = [Document(f"Station {number} has {number * 7} rooms, and a garden.") for number in range(5)]


@pytest.fixture(scope="module")
def adapter(model_path: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of three training steps, large enough to matter."""
    folder = tmp_path_factory.mktemp("adapted")
    documents = folder / "documents"
    documents.mkdir()
    for number in range(20):
        (documents / f"{number}.txt").write_text(f"Station {number} is in Riga. Its {number} rooms are let.")
    given = ["--documents", str(documents), "--output", str(folder / "out"), "--work", str(folder / "work")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "SAMPLES_A_STEP", 2)
        patch.setattr(trainer, "_HELD_OUT_SAMPLES", 3)
        patch.setattr(trainer, "RATE", 0.3)
        patch.setattr(trainer.Trainer, "use_best", lambda _: None)  # such steps make nothing better
        assert adapt([str(model_path("tiny-llama")), *given, "--positions", "all", "--steps", "3", "--tasks", "2"]) == 0
    return folder / "out"


@pytest.fixture(scope="module")
def adapted(model_path: Callable[[str], Path], adapter: Path, pool: ServerPool) -> TesseraServer:
    return pool.get(*arguments_of(model_path("tiny-llama")), "--chunk-adapter", str(adapter))


@pytest.mark.parametrize("strategy", [None, "offset", "shared", "parallel"])
def test_the_server_predicts_what_training_predicts(adapted, adapter, model_path, strategy):
    """The first strategy that it was trained for is the default; the ready line names the adapter."""
    assert f"chunks computed with the adapter {adapter}" in adapted.log.read_text()
    asked: Any = {"system": SYSTEM, "chunks": [document.text for document in DOCUMENTS], "question": QUESTION}
    asked |= {"max_tokens": STEPS, "temperature": 0, "ignore_eos": True, "logprobs": True, "return_token_ids": True}
    answer = adapted.chat(**asked, cache={"position_strategy": strategy} if strategy else {})
    report, (choice,) = answer["cache"], answer["choices"]
    strategy = strategy or "shared"
    assert (report["mode"], report["position_strategy"]) == ("chunked", strategy)
    tokens, folder = choice["token_ids"], model_path("tiny-llama")
    template, model = Template(AutoTokenizer.from_pretrained(folder)), load(folder)
    question = template.branch(SYSTEM, Task(QUESTION, "")).question
    sample = Sample(template.prompt(SYSTEM, DOCUMENTS), (Branch(question, tuple(tokens)),))
    with torch.no_grad():
        plain = log_probabilities(model, make_row(sample.prompt, sample.branches, strategy))
        student = Student(model, template.segments, seed=0, rank=16)
        set_peft_model_state_dict(student._peft, load_file(adapter / "adapter_model.safetensors"))
        found = student.log_probabilities(sample, strategy)
    assert float((found - plain).abs().max()) > 0.01
    served = torch.tensor([each["logprob"] for each in choice["logprobs"]["content"]])
    expected = found[len(question) - 1 :].gather(1, torch.tensor(tokens)[:, None])[:, 0]
    torch.testing.assert_close(served, expected, rtol=0, atol=1e-4)
