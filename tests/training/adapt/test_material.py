# SPDX-License-Identifier: Apache-2.0
"""Samples from documents, and documents that can't be used."""

import random
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from app.documents.document import Document
from tests.app.pdfs import make_pdf
from training.adapt.material import _COUNT as COUNT
from training.adapt.material import (
    LEAST_PASSAGES,
    Material,
    MaterialError,
    Task,
    Template,
    _sentences,
    read_passages,
    task_across,
    tasks_of,
)

TEXT = "The Falcon station lies in Riga. It was built in 1957 by three brothers. Breakfast ends at nine."


def test_tasks_ask_for_something_in_the_passage() -> None:
    tasks = list(islice(tasks_of(TEXT, random.Random(0)), 50))
    assert all(task.answer.strip(".,") in TEXT and task.answer for task in tasks)
    assert len({task.question for task in tasks}) > 20
    assert any("____" in task.question for task in tasks)


def test_tasks_about_several_passages() -> None:
    texts = [TEXT, "The Kestrel station lies in Riga as well.", "The Falcon trains go there each hour."]
    tasks = [task_across(texts, random.Random(seed)) for seed in range(60)]
    counts = [task for task in tasks if task.answer.isdigit()]
    assert 10 < len(counts) < 50
    for task in counts:
        name = next(each for form in COUNT for each in [_filled(form, task.question)] if each)
        assert int(task.answer) == sum(name.lower() in text.lower() for text in texts)
    for task in set(tasks).difference(counts):
        assert sum(any(sentence in task.answer for sentence in _sentences(text)) for text in texts) == 2


def _filled(form: str, question: str) -> str | None:
    before, _, after = form.partition("{}")
    return question[len(before) : -len(after)] if question.startswith(before) and question.endswith(after) else None


@pytest.mark.parametrize("text", ["One.", "word " * 300, "\n", "Ein Satz ohne Ende"])
def test_any_text_gives_tasks(text: str) -> None:
    assert all(task.question for task in islice(tasks_of(text, random.Random(0)), 20))
    assert all(task_across([text, text, TEXT], random.Random(seed)).question for seed in range(20))


def test_samples_are_a_function_of_seed_and_step_and_held_out_passages_are_never_trained(material: Material) -> None:
    assert material.sample("train", 0, 5) == material.sample("train", 0, 5)
    assert material.sample("train", 0, 5) != material.sample("train", 0, 6)
    assert material.sample("train", 0, 5) != material.sample("train", 1, 5)
    chunks = {
        part: {chunk.packed for step in range(60) for chunk in material.sample(part, 0, step).prompt.chunks}
        for part in ("train", "heldout")
    }
    assert chunks["train"]
    assert chunks["heldout"]
    assert chunks["train"].isdisjoint(chunks["heldout"])


def test_prompts_are_what_the_template_makes(tokenizer: Any) -> None:
    template = Template(tokenizer)
    documents = [Document("One."), Document("Two.", title="B")]
    prompt, branch = template.prompt("Answer.", documents), template.branch("Answer.", Task("Where?", "Here."))
    messages = [
        {"role": "system", "content": "Answer."},
        {"role": "user", "content": "".join(each.render() for each in documents) + "Where?"},
    ]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    context = prompt.token_ids[: prompt.num_context_tokens]
    assert [*context, *branch.question] == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(branch.answer) == "Here." + tokenizer.eos_token


def folder_of(tmp_path: Path, **files: bytes) -> Path:
    for name, content in files.items():
        path = tmp_path / name.replace("_", ".")
        path.write_bytes(content)
    return tmp_path


def test_files_are_split_as_the_server_splits_them(tmp_path: Path, tokenizer: Any) -> None:
    markdown = "\n".join(f"# Part {i}\nText of part {i}." for i in range(LEAST_PASSAGES))
    folder_of(tmp_path, a_md=markdown.encode(), b_txt=b"Plain text.", c_pdf=make_pdf(["In a PDF."]), d_bin=b"\xff")
    first, *_, plain, pdf = read_passages(tmp_path, Template(tokenizer).segments, 64)
    assert first == Document("Text of part 0.", title="Part 0")
    assert (plain.text, pdf.text) == ("Plain text.", "In a PDF.")


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "0 passages of at most 64 tokens; 16 are needed: give more files"),
        ({"a_txt": b"One."}, "1 passages"),
        ({"a_txt": b"\x00\x01\xfe"}, "a.txt: the file is not text"),
        ({"a_pdf": b"no"}, "a.pdf: this is not a PDF"),
    ],
)
def test_documents_that_cannot_be_used(tmp_path: Path, tokenizer: Any, files: dict[str, bytes], words: str) -> None:
    with pytest.raises(MaterialError, match=words):
        read_passages(folder_of(tmp_path, **files), Template(tokenizer).segments, 64)
    with pytest.raises(MaterialError, match="is not a folder"):
        read_passages(tmp_path / "absent", Template(tokenizer).segments, 64)


def test_a_model_without_a_chat_template(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", None)
    with pytest.raises(MaterialError, match="no chat template"):
        Template(tokenizer)
