# SPDX-License-Identifier: Apache-2.0
"""Question files: Tessera's own, those of public data sets (what they say is invented), and what is wrong with one."""

import json

import pytest

from app.documents.document import Document
from measuring.quality.questions.datasets import CHUNK_CHARACTERS, load_questions
from measuring.quality.questions.questions import Question, digest
from measuring.quality.questions.records import QuestionFileError
from tests.measuring.quality.helpers import make_question

OWN = {"chunks": ["One."], "question": "Which?", "answers": ["one"]}
# What public data sets are asked with.
SYSTEM = "Answer from the documents, in as few words as possible. If they don't have the answer, say: I don't know"
HOTPOT = {
    "_id": "5a8b",
    "question": "Which river runs by the town of Ana Kalns?",
    "answer": "Svēte",
    "supporting_facts": [["Ana Kalns", 0]],
    "context": [["Ana Kalns", ["Ana Kalns lives in Elgava.", " She paints."]], ["Elgava", ["It is on the Svēte."]]],
}
MUSIQUE = {
    "id": "2hop__1_2",
    "question": "Who founded the home of Falcon?",
    "answer": "Ana Kalns",
    "answer_aliases": ["A. Kalns", ""],
    "answerable": True,
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
    "_id": "e1",
}


@pytest.fixture
def load(tmp_path):
    """Loads a file of these lines: JSON, or text as it stands."""

    def load(*lines: object, **options: str) -> list[Question]:
        file = tmp_path / "data.jsonl"
        texts = [line if isinstance(line, str | bytes) else json.dumps(line) for line in lines]
        file.write_bytes(b"\n".join(text if isinstance(text, bytes) else text.encode() for text in texts))
        return load_questions(file, **options)

    return load


# Tessera's own format


def test_all_fields_and_what_may_be_left_out(load):
    record = {"id": "a", "system": "Answer.", "chunks": ["One.", {"title": "B", "text": "Two."}, {"text": "Three."}]}
    record |= {"question": "Which?", "answers": ["one", "two"], "kind": "hard", "metadata": {"anything": [1]}}
    chunks = (Document("One."), Document("Two.", title="B"), Document("Three."))
    assert load(record) == [Question("a", "Answer.", chunks, "Which?", ("one", "two"), "hard")]
    question = {"chunks": ["One."], "question": "Which?"}
    assert load(OWN, "", "  \r", {**question, "answer": "one"}, {**question, "answers": []}) == [
        Question("1", "", (Document("One."),), "Which?", ("one",)),
        Question("4", "", (Document("One."),), "Which?", ("one",)),
        Question("5", "", (Document("One."),), "Which?", ()),
    ]


def test_an_array_a_byte_order_mark_and_line_separators_inside_strings(load):
    text = json.dumps(OWN).replace("Which?", "a\u2028b\u0085c \\ud83d\\ude00")
    for content in (b"\xef\xbb\xbf" + text.encode(), f"\n[{text}]"):
        (question,) = load(content)
        assert question.question == "a\u2028b\u0085c 😀"


def test_the_digest_is_of_all_that_is_asked():
    one, same = make_question(), make_question()
    others = [make_question("2"), make_question(system="x"), make_question("1", "Falcon"), make_question(answers=())]
    assert digest([one]) == digest([same])
    assert len({digest(each) for each in ([one], [one, one], *([other] for other in others))}) == 6


# Public data sets


def test_hotpotqa_and_2wikimultihopqa(load):
    chunks = (
        Document("Ana Kalns lives in Elgava. She paints.", title="Ana Kalns"),
        Document("It is on the Svēte.", title="Elgava"),
    )
    expected = [Question("5a8b", SYSTEM, chunks, "Which river runs by the town of Ana Kalns?", ("Svēte",))]
    assert load(HOTPOT) == load(f"[{json.dumps(HOTPOT)}]") == expected
    (other,) = load(HOTPOT, refusal="Not in the documents.")
    assert other.system.endswith("say: Not in the documents.")
    (question,) = load({**HOTPOT, "context": [["Empty", []], ["Blank", [" "]], ["Elgava", ["It is on the Svēte."]]]})
    assert question.chunks == (Document("It is on the Svēte.", title="Elgava"),)


def test_musique_has_a_question_twice_and_longbench_passages(load):
    answerable, not_answerable = load(MUSIQUE, {**MUSIQUE, "answerable": False})
    chunks = (Document("Falcon is at Elgava.", title="Falcon"), Document("Founded by Ana Kalns.", title="Elgava"))
    assert answerable == Question("2hop__1_2", SYSTEM, chunks, MUSIQUE["question"], ("Ana Kalns", "A. Kalns"))
    assert not_answerable == Question("2hop__1_2 (unanswerable)", SYSTEM, chunks, MUSIQUE["question"], ())
    chunks = (Document("Falcon is in Riga.\nIt flies.", title="Falcon"), Document("No more than a line."))
    assert load(LONGBENCH) == [Question("e1", SYSTEM, chunks, "Where is Falcon?", ("Riga", "in Riga"))]
    (unanswerable,) = load({**LONGBENCH, "answers": ["unanswerable", "unanswerable"]})  # Qasper's word
    assert unanswerable.answers == ()


@pytest.mark.parametrize("start", ["", "Before. Passage 1:\n", "Before.\nPassage 1:\n"])
def test_other_longbench_contexts_are_cut_at_paragraph_ends(load, start):
    first = start + "a" * (CHUNK_CHARACTERS - 10 - len(start))
    paragraphs = [first, "b" * 20, "c", "", "d" * (3 * CHUNK_CHARACTERS), "e"]
    (question,) = load({**LONGBENCH, "context": "\n".join(paragraphs)})
    texts = [chunk.text for chunk in question.chunks]
    assert texts == ["\n".join(paragraphs[:2]), "\n".join(["c", paragraphs[4]]), "e"]
    assert {chunk.title for chunk in question.chunks} == {None}


# Faults

EITHER = ": needs either answers (a list; empty if no chunk has the answer) or answer (a string)"
UNKNOWN = (
    ", line 1: is of no known format. Known, with the fields they need: Tessera's own (chunks, question); "
    "MuSiQue (id, question, answer, paragraphs); LongBench (_id, input, context, answers); HotpotQA, 2WikiMultihopQA ("
)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({**OWN, "chunks": ["a", "b", {"text": 7}]}, ", chunks.2.text: must be a string, not number"),
        ({**OWN, "chunks": ["a", None]}, ", chunks.1: must be a string or an object with a text"),
        ({**OWN, "chunks": [{"title": "B"}]}, ", chunks.0.text: is missing"),
        ({**OWN, "chunks": [{"text": "a", "title": ["B"]}]}, ", chunks.0.title: must be a string, not list"),
        ({**OWN, "chunks": ["a", " \n"]}, ", chunks.1.text: is empty"),
        ({**OWN, "chunks": []}, ", chunks: is empty"),
        ({**OWN, "chunks": None}, ", chunks: must be a list, not null"),
        ({**OWN, "question": True}, ", question: must be a string, not boolean"),
        ({**OWN, "system": {"a": 1}}, ", system: must be a string, not object"),
        ({**OWN, "answers": [1.5]}, ", answers.0: must be a string, not number"),
        ({**OWN, "answer": "one"}, EITHER),
        ({**OWN, "answers": None}, EITHER),
        ({**OWN, "anwsers": []}, ", anwsers: is an unknown field"),
        ({**HOTPOT, "context": [["A", ["a"]], ["B", "b"]]}, ", context.1.1: must be a list, not string"),
        ({**HOTPOT, "context": [["A", ["a"]], ["B"]]}, ", context.1.1: is missing"),
        ({**HOTPOT, "context": [["A", ["a"], 1]]}, ", context.0: has too many items"),
        ({**HOTPOT, "context": [{"title": "A"}]}, ", context.0: must be a list, not object"),
        ({**HOTPOT, "context": [["A", []]]}, ": has no document with text in it"),
        ({name: HOTPOT[name] for name in ("_id", "question", "context")}, ", answer: is missing"),
        ({**MUSIQUE, "answerable": "no"}, ", answerable: must be true or false, not string"),
        ({**MUSIQUE, "paragraphs": [{"title": "A"}]}, ", paragraphs.0.paragraph_text: is missing"),
        ({**LONGBENCH, "answers": []}, ", answers: is empty"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_fault_of_a_record_is_said_with_its_place(load, tmp_path, record, message):
    with pytest.raises(QuestionFileError) as raised:
        load("", record)
    assert str(raised.value) == f"{tmp_path}/data.jsonl, line 2{message}"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([" ", ""], ": has no questions in it"),
        (["[]"], ": has no questions in it"),
        ([OWN, b'{"a": "\xff"}'], ", line 2: is not UTF-8"),
        ([b"\xef\xbb\xbf{}", b"\xff"], ", line 2: is not UTF-8"),
        ([OWN, '{"a": '], ", line 2: invalid JSON at column 7: Expecting value"),
        (["[{},", '{"a" 2}]'], ": invalid JSON at line 2, column 6: Expecting ':' delimiter"),
        (['{"a": "\\ud83d"}'], ", line 1: invalid JSON: a string has half of a surrogate pair"),
        (['{"a": ' * 200_000], ", line 1: invalid JSON: nested too deeply"),
        ([OWN, "7"], ", line 2: must be an object, not number"),
        ([OWN, {**OWN, "id": "1"}], ", line 2, id: '1' is the id in "),
        ([{"question": "Which?"}], UNKNOWN),
        ([7], UNKNOWN),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_fault_of_a_file_is_said_with_its_place(load, tmp_path, lines, message):
    with pytest.raises(QuestionFileError) as raised:
        load(*lines)
    assert str(raised.value).startswith(f"{tmp_path}/data.jsonl{message}")


def test_a_folder(tmp_path):
    with pytest.raises(QuestionFileError, match="Is a directory"):
        load_questions(tmp_path)
