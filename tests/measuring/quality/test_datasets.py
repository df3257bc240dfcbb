# SPDX-License-Identifier: Apache-2.0
"""Files in the formats of public data sets; what they say is invented."""

import json
from pathlib import Path

import pytest

from app.documents.document import Document
from measuring.quality.questions.datasets import CHUNK_CHARACTERS, load_questions
from measuring.quality.questions.questions import Question
from measuring.quality.questions.records import QuestionFileError

# What public data sets are asked with.
SYSTEM = "Answer from the documents, in as few words as possible. If they don't have the answer, say: I don't know"
HOTPOT = {
    "_id": "5a8b",
    "question": "Which river runs by the town of Ana Kalns?",
    "answer": "Svēte",
    "type": "bridge",
    "level": "hard",
    "supporting_facts": [["Ana Kalns", 0]],
    "context": [["Ana Kalns", ["Ana Kalns lives in Elgava.", " She paints."]], ["Elgava", ["It is on the Svēte."]]],
}
MUSIQUE = {
    "id": "2hop__1_2",
    "question": "Who founded the home of Falcon?",
    "answer": "Ana Kalns",
    "answer_aliases": ["A. Kalns", ""],
    "answerable": True,
    "question_decomposition": [{"id": 1, "question": "#1", "answer": "x", "paragraph_support_idx": 0}],
    "paragraphs": [
        {"idx": 0, "title": "Falcon", "paragraph_text": "Falcon is at Elgava.", "is_supporting": True},
        {"idx": 1, "title": "Elgava", "paragraph_text": "Founded by Ana Kalns.", "is_supporting": True},
    ],
}
LONGBENCH = {
    "input": "Where is Falcon?",
    "context": "Passage 1:\nFalcon\nFalcon is in Riga.\nIt flies.\n\nPassage 2:\nNo more than a line.\n",
    "answers": ["Riga", "in Riga"],
    "length": 12,
    "dataset": "hotpotqa",
    "language": "en",
    "all_classes": None,
    "_id": "e1",
}
OWN = {"chunks": ["One."], "question": "Which?", "answers": ["one"]}
ARRAY, LINES = "array", "lines"


def write(folder: Path, kind: str, *records: object) -> Path:
    file = folder / "data.json"
    lines = [json.dumps(record) for record in records]
    file.write_text(f"[{', '.join(lines)}]" if kind == ARRAY else "\n".join(lines))
    return file


@pytest.mark.parametrize("kind", [ARRAY, LINES])
@pytest.mark.parametrize("format", ["auto", "hotpotqa", "2wikimultihopqa"])
def test_hotpotqa_and_2wikimultihopqa(tmp_path, kind, format):
    chunks = (
        Document("Ana Kalns lives in Elgava. She paints.", title="Ana Kalns"),
        Document("It is on the Svēte.", title="Elgava"),
    )
    assert load_questions(write(tmp_path, kind, HOTPOT), format) == [
        Question("5a8b", SYSTEM, chunks, "Which river runs by the town of Ana Kalns?", ("Svēte",))
    ]


@pytest.mark.parametrize("format", ["auto", "musique"])
def test_musique_has_a_question_twice(tmp_path, format):
    answerable, not_answerable = load_questions(
        write(tmp_path, LINES, MUSIQUE, {**MUSIQUE, "answerable": False}), format
    )
    chunks = (Document("Falcon is at Elgava.", title="Falcon"), Document("Founded by Ana Kalns.", title="Elgava"))
    assert answerable == Question("2hop__1_2", SYSTEM, chunks, MUSIQUE["question"], ("Ana Kalns", "A. Kalns"))
    assert not_answerable == Question("2hop__1_2 (unanswerable)", SYSTEM, chunks, MUSIQUE["question"], ())


@pytest.mark.parametrize("format", ["auto", "longbench"])
def test_longbench_passages(tmp_path, format):
    chunks = (Document("Falcon is in Riga.\nIt flies.", title="Falcon"), Document("No more than a line."))
    assert load_questions(write(tmp_path, LINES, LONGBENCH), format) == [
        Question("e1", SYSTEM, chunks, "Where is Falcon?", ("Riga", "in Riga"))
    ]


@pytest.mark.parametrize("start", ["", "Before. Passage 1:\n", "Before.\nPassage 1:\n"])
def test_other_longbench_contexts_are_cut_at_paragraph_ends(tmp_path, start):
    paragraphs = [
        start + "a" * (CHUNK_CHARACTERS - 10 - len(start)),
        "b" * 20,
        "c",
        "",
        "d" * (3 * CHUNK_CHARACTERS),
        "e",
    ]
    (question,) = load_questions(write(tmp_path, LINES, {**LONGBENCH, "context": "\n".join(paragraphs)}))
    texts = [chunk.text for chunk in question.chunks]
    assert texts == ["\n".join(paragraphs[:2]), "\n".join(["c", paragraphs[4]]), "e"]
    assert {chunk.title for chunk in question.chunks} == {None}


def test_qasper_has_questions_without_an_answer(tmp_path):
    (question,) = load_questions(write(tmp_path, LINES, {**LONGBENCH, "answers": ["unanswerable", "unanswerable"]}))
    assert question.answers == ()


@pytest.mark.parametrize("format", ["auto", "jsonl"])
def test_our_own_format_keeps_its_system_prompt(tmp_path, format):
    assert load_questions(write(tmp_path, LINES, OWN), format) == [
        Question("1", "", (Document("One."),), "Which?", ("one",))
    ]


def test_public_data_sets_are_told_how_to_refuse(tmp_path):
    (question,) = load_questions(write(tmp_path, ARRAY, HOTPOT), refusal="Not in the documents.")
    assert question.system.endswith("say: Not in the documents.")


def test_paragraphs_without_text_are_left_out(tmp_path):
    context = [["Empty", []], ["Blank", [" "]], ["Elgava", ["It is on the Svēte."]]]
    (question,) = load_questions(write(tmp_path, ARRAY, {**HOTPOT, "context": context}))
    assert question.chunks == (Document("It is on the Svēte.", title="Elgava"),)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({**HOTPOT, "context": [["A", ["a"]], ["B", "b"]]}, ", context.1.1: must be a list, not string"),
        ({**HOTPOT, "context": [["A", ["a"]], ["B"]]}, ", context.1.1: is missing"),
        ({**HOTPOT, "context": [["A", ["a"], 1]]}, ", context.0: has too many items"),
        ({**HOTPOT, "context": [{"title": "A"}]}, ", context.0: must be a list, not object"),
        ({**HOTPOT, "context": []}, ", context: is empty"),
        ({**HOTPOT, "context": [["A", []]]}, ": has no document with text in it"),
        ({**HOTPOT, "_id": None}, ", _id: must be a string, not null"),
        ({name: HOTPOT[name] for name in ("_id", "question", "context")}, ", answer: is missing"),
        ({**MUSIQUE, "answerable": "no"}, ", answerable: must be true or false, not string"),
        ({**MUSIQUE, "paragraphs": [{"title": "A"}]}, ", paragraphs.0.paragraph_text: is missing"),
        ({**MUSIQUE, "answer_aliases": "a"}, ", answer_aliases: must be a list, not string"),
        ({**LONGBENCH, "input": ""}, ", input: is empty"),
        ({**LONGBENCH, "answers": []}, ", answers: is empty"),
        ({**LONGBENCH, "context": 7}, ", context: must be a string, not number"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_wrong_is_said_with_its_place(tmp_path, record, message):
    with pytest.raises(QuestionFileError) as raised:
        load_questions(write(tmp_path, ARRAY, record))
    assert str(raised.value) == f"{tmp_path}/data.json, record 1{message}"


def test_two_records_of_one_id(tmp_path):
    with pytest.raises(QuestionFileError, match=r"record 2, id: '5a8b' is the id in .*record 1 too"):
        load_questions(write(tmp_path, ARRAY, HOTPOT, HOTPOT))


@pytest.mark.parametrize("record", [{"question": "Which?"}, {}, 7, ["chunks"]])
def test_an_unknown_format_names_those_there_are(tmp_path, record):
    with pytest.raises(QuestionFileError) as raised:
        load_questions(write(tmp_path, ARRAY, record))
    assert str(raised.value).removeprefix(f"{tmp_path}/data.json, record 1: ") == (
        "is of no known format. Known, with the fields they need: jsonl (chunks, question); "
        "hotpotqa (_id, question, answer, context); 2wikimultihopqa (_id, question, answer, context); "
        "musique (id, question, answer, paragraphs); longbench (_id, input, context, answers)"
    )


def test_a_given_format_is_what_the_file_must_have(tmp_path):
    with pytest.raises(QuestionFileError, match=r"record 1, id: is missing"):
        load_questions(write(tmp_path, ARRAY, HOTPOT), "musique")
