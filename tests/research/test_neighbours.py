# SPDX-License-Identifier: Apache-2.0
"""The questions that refer back to the passage before, and their passages."""

import hashlib
import json

import httpx
import numpy as np
import pytest

from app.documents.splitting import Piece
from research import measure_neighbours
from research.measure_neighbours import (
    CONTEXT,
    FOLDER,
    FULL,
    ISOLATED,
    PACKAGE,
    PAGE,
    Asked,
    Reference,
    UnfitError,
    fitting,
    measure_accuracy,
    measure_times,
    page,
    passages,
    planets,
    read_references,
    regained,
)

WRITTEN_FOR = "1751f1f431094baef1fb929c618cfaeb8772625bc276d3168596a592e56f6b6b"
"""Digest of the text that the questions were written for."""
REFERENCE = Reference("map.txt", "Falcon", "the code is", "What is the code of Falcon?", ["7342"], "another code")


@pytest.fixture(scope="module")
def text() -> str:
    file = FOLDER / "map.txt"
    if not file.is_file():
        pytest.skip(f"{PACKAGE} is not installed")
    text = planets(file)
    if hashlib.sha256(text.encode()).hexdigest() != WRITTEN_FOR:
        pytest.skip(f"this {PACKAGE} has another text than the questions were written for")
    return text


def pieces(*texts: str) -> list[Piece]:
    return [Piece(None, text, 1, 0, len(text), None) for text in texts]


def test_questions():
    references = read_references()
    assert len(references) == len({each.question for each in references}) == 100
    assert len({each.phrase for each in references}) == 100
    for reference in references:
        words = (reference.file, reference.subject, reference.phrase, reference.rival, *reference.answers)
        assert reference.answers
        assert all(each.strip() == each != "" for each in words), reference
        assert reference.subject in reference.question
        assert reference.phrase != reference.rival
        assert all(len(each.split()) <= 8 for each in (reference.phrase, reference.rival, *reference.answers)), (
            reference
        )


def test_questions_refer_back_to_the_passage_before(text: str):
    asked, unfit = fitting(read_references(), {"map.txt": passages(text)})
    assert unfit == {}
    places = [[reference.phrase in piece.text for piece in page].index(True) for reference, page in asked]
    assert set(places) == set(range(1, PAGE))
    assert all(len(page) == PAGE for _, page in asked)


def test_page():
    before, passage, rival = "It is Falcon.", "Here the code is 7342.", "There is another code."
    others = [f"passage {number}" for number in range(20)]
    text = pieces(*others[:10], before, passage, "between", rival, *others[10:])
    starts = [text.index(page(REFERENCE, text, number)[0]) for number in range(6)]
    assert starts == [6, 7, 8, 9, 10, 6]
    assert all(len(page(REFERENCE, text, number)) == PAGE for number in range(6))


@pytest.mark.parametrize(
    ("texts", "why"),
    [
        (["Here the code is 7342.", "another code"], "the passage before doesn't name"),
        (["Falcons.", "Here the code is 7342.", "another code"], "the passage before doesn't name"),
        (["Falcon.", "Here the code is 7342, of Falcon.", "another code"], "names the subject itself"),
        (["Falcon.", "Here the code is 73421.", "another code"], "has no answer"),
        (["Falcon.", "Here the code is 7342.", "another code: 7342"], "has the same answer"),
        (["Falcon.", "Here the code is 7342.", "the code is", "another code"], "2 passages have 'the code is'"),
        (["Falcon.", "Here the code is 7342."], "0 passages have 'another code'"),
        (
            ["Falcon.", "Here the code is 7342.", "another code", "Falcon: 7342.", *"1234"],
            "another passage names the subject",
        ),
        (["Falcon.", "Here the code is 7342.", *"1234567", "another code"], "no page has passage and rival"),
        (["Falcon.", "Here the code is 7342.", "another code"], "no page has passage and rival"),
    ],
)
def test_questions_that_do_not_fit(texts: list[str], why: str):
    with pytest.raises(UnfitError, match=why):
        page(REFERENCE, pieces(*texts), 0)


def test_planets_are_read_as_prose(tmp_path):
    file = tmp_path / "map.txt"
    file.write_text('system Sol\n\tpos 1 2\nplanet "New Riga"\n\tdescription `A world.`\n\tspaceport `\tA port.`\n')
    assert planets(file) == "New Riga\n\nA world.\n\nA port."
    with pytest.raises(SystemExit, match=f"No such file or directory: apt-get install {PACKAGE}"):
        planets(tmp_path / "none.txt")


def test_each_way_asks_the_same_and_only_one_sends_the_text_before():
    bodies = []

    def answer(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        bodies.append(body)
        is_right = body["cache"]["mode"] == "full" or "context" in body["chunks"][0]
        chunks = [{"status": "hit"} for _ in body["chunks"]]
        report = {"mode": body["cache"]["mode"], "chunks": chunks, "timings_ms": {"first_token": len(bodies)}}
        message = {"content": "It is 7342." if is_right else "It is 1234."}
        return httpx.Response(200, json={"choices": [{"message": message}], "cache": report})

    texts = {"map.txt": "Falcon.\n\nHere the code is 7342."}
    page = [Piece(None, "Here the code is 7342.", 9, 9, 31, None)]
    with httpx.Client(transport=httpx.MockTransport(answer), base_url="http://test") as client:
        accuracies = measure_accuracy(client, [Asked(REFERENCE, page)] * 2, texts)
        assert accuracies == {FULL: [1, 1], ISOLATED: [0, 0], CONTEXT: [1, 1]}
        assert len({json.dumps({**body, "chunks": [], "cache": {}}) for body in bodies}) == 1
        contexts = [body["chunks"][0].get("context") for body in bodies]
        assert sorted(contexts, key=str) == ["Falcon.\n\n"] * 2 + [None] * 4
        bodies.clear()
        times = measure_times(client, [Asked(REFERENCE, page)] * 2, texts)
    assert times == {CONTEXT: [2, 8], ISOLATED: [4, 6]}  # each after it was asked once


def test_share_that_comes_back():
    lost, won = np.array([1.0] * 20 + [0.0] * 80), np.array([1.0] * 15 + [0.0] * 85)
    share, low, high = regained(lost, won)
    assert share == pytest.approx(0.75)
    assert 0.5 < low < 0.75 < high < 1
    assert regained(lost, lost) == (1, 1, 1)


def test_report(capsys):
    full, isolated, context = [1.0] * 10, [1.0] * 6 + [0.0] * 4, [1.0] * 9 + [0.0]
    measure_neighbours.print_accuracy({FULL: full, ISOLATED: isolated, CONTEXT: context})
    measure_neighbours.print_times({ISOLATED: [100.0] * 3, CONTEXT: [101.0, 99.0, 100.0]})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "full attention: 100.0 % of 10 right"
    assert lines[3].startswith("isolated minus full attention: -40.0 points (-")
    assert lines[6].startswith("of isolation's loss comes back: 75 % (")
    assert lines[-1] == "with context over isolated: 1.000 (0.990 to 1.010)"
    measure_neighbours.print_accuracy({FULL: full, ISOLATED: full, CONTEXT: full})
    assert capsys.readouterr().out.endswith("isolation loses nothing that could come back\n")
