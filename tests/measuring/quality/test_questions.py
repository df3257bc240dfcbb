# SPDX-License-Identifier: Apache-2.0
"""Tessera's own question files."""

import json

import pytest

from app.documents.document import Document
from measuring.quality.questions.datasets import load_questions
from measuring.quality.questions.questions import Question, digest
from measuring.quality.questions.records import QuestionFileError
from tests.measuring.quality.helpers import make_question

GOOD = {"chunks": ["One."], "question": "Which?", "answers": ["one"]}


@pytest.fixture
def load(tmp_path):
    """Loads a file of the given records (JSON, or text as it stands)."""

    def load(*records: object) -> list[Question]:
        file = tmp_path / "questions.jsonl"
        file.write_text("\n".join(record if isinstance(record, str) else json.dumps(record) for record in records))
        return load_questions(file, "jsonl")

    return load


def test_all_fields(load):
    record = {
        "id": "a",
        "system": "Answer.",
        "chunks": ["One.", {"title": "B", "text": "Two."}, {"text": "Three."}],
        "question": "Which?",
        "answers": ["one", "two"],
        "metadata": {"anything": [1]},
    }
    chunks = (Document("One."), Document("Two.", title="B"), Document("Three."))
    assert load(record) == [Question("a", "Answer.", chunks, "Which?", ("one", "two"))]
    assert load({**record, "kind": "hard"})[0].kind == "hard"


def test_what_may_be_left_out(load):
    assert load(GOOD, "", GOOD) == [
        Question("1", "", (Document("One."),), "Which?", ("one",)),
        Question("3", "", (Document("One."),), "Which?", ("one",)),
    ]


def test_one_answer_and_none(load):
    question = {"chunks": ["One."], "question": "Which?"}
    one, none = load({**question, "answer": "one"}, {**question, "answers": []})
    assert (one.answers, none.answers) == (("one",), ())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chunks": ["a", "b", {"text": 7}]}, "chunks.2.text: must be a string, not number"),
        ({"chunks": ["a", 7]}, "chunks.1: must be a string or an object with a text"),
        ({"chunks": ["a", None]}, "chunks.1: must be a string or an object with a text"),
        ({"chunks": [{"title": "B"}]}, "chunks.0.text: is missing"),
        ({"chunks": [{"text": "a", "title": ["B"]}]}, "chunks.0.title: must be a string, not list"),
        ({"chunks": [{"text": "a", "body": "b"}]}, "chunks.0.body: is an unknown field"),
        ({"chunks": ["a", " \n"]}, "chunks.1.text: is empty"),
        ({"chunks": []}, "chunks: is empty"),
        ({"chunks": "a"}, "chunks: must be a list, not string"),
        ({"chunks": None}, "chunks: must be a list, not null"),
        ({"question": True}, "question: must be a string, not boolean"),
        ({"question": ""}, "question: is empty"),
        ({"system": {"a": 1}}, "system: must be a string, not object"),
        ({"id": 7}, "id: must be a string, not number"),
        ({"id": ""}, "id: is empty"),
        ({"answers": "one"}, "answers: must be a list, not string"),
        ({"answers": [1.5]}, "answers.0: must be a string, not number"),
        ({"answers": ["one", ""]}, "answers.1: is empty"),
        ({"answer": "one"}, "needs either answers (a list; empty if no chunk has the answer) or answer (a string)"),
        ({"answers": None}, "needs either answers (a list; empty if no chunk has the answer) or answer (a string)"),
        ({"anwsers": []}, "anwsers: is an unknown field"),
    ],
    ids=str,
)
def test_what_is_wrong_is_said_with_its_place(load, tmp_path, change, message):
    with pytest.raises(QuestionFileError) as raised:
        load(GOOD, GOOD | change)
    separator = ": " if message.startswith("needs") else ", "
    assert str(raised.value) == f"{tmp_path}/questions.jsonl, line 2{separator}{message}"


@pytest.mark.parametrize("field", ["chunks", "question"])
def test_a_missing_field(load, field):
    with pytest.raises(QuestionFileError, match=rf"line 1, {field}: is missing$"):
        load({name: value for name, value in GOOD.items() if name != field})


@pytest.mark.parametrize(
    ("record", "kind"), [("7", "number"), ('"a"', "string"), ("null", "null"), ("true", "boolean")]
)
def test_a_record_is_an_object(load, record, kind):
    with pytest.raises(QuestionFileError, match=rf"line 1: must be an object, not {kind}$"):
        load(record)


@pytest.mark.parametrize("second", [{"id": "a"}, {"id": "1"}])
def test_an_id_is_used_once(load, second):
    first = {"id": "a"} if second == {"id": "a"} else {}
    with pytest.raises(QuestionFileError, match=r"line 2, id: '.' is the id in .*line 1 too$"):
        load(GOOD | first, GOOD | second)


def test_the_digest_is_of_all_that_is_asked():
    question = make_question()
    assert digest([question]) == digest([make_question()])
    others = [
        [make_question("2")],
        [make_question(system="x")],
        [make_question("1", "Falcon")],
        [make_question(answers=())],
        [question, question],
    ]
    assert len({digest([question]), *map(digest, others)}) == 6
