# SPDX-License-Identifier: Apache-2.0
"""Documents are cut through their answers' sentences, and the file is read as written."""

from pathlib import Path

from evaluation.cut import COUNT, cut_questions, main
from evaluation.demo import CHUNKS, demo_questions
from evaluation.questions import load_jsonl


def test_sentences_with_answers_are_cut() -> None:
    whole = {question.id: question for question in demo_questions(40)}
    for question in cut_questions(40):
        texts = [document.text for document in question.chunks]
        assert len(texts) == len(whole[question.id].chunks)
        assert all(texts)
        joined = [f"{a} {b}" for a, b in zip(texts[::2], texts[1::2], strict=True)]
        assert set(joined) <= {" ".join(document.text.split()) for document in whole[question.id].chunks}
        if question.answers:
            value = question.answers[0]
            cut = [b for a, b in zip(texts[::2], texts[1::2], strict=True) if value in f"{a} {b}"]
            assert cut
            assert all(value in b.split(". ")[0] + "." for b in cut)


def test_the_file_is_read_as_written(tmp_path: Path) -> None:
    assert main([str(tmp_path / "cut.jsonl")]) == 0
    assert load_jsonl(tmp_path / "cut.jsonl") == list(cut_questions(COUNT))
    assert len(load_jsonl(tmp_path / "cut.jsonl")) == COUNT * len(CHUNKS)


def test_a_file_has_to_be_named() -> None:
    assert main([]) == main(["--help"]) == 2
