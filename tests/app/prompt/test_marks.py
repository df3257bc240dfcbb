# SPDX-License-Identifier: Apache-2.0
"""Marks carry segment boundaries through a template; foreign marks have no effect."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.documents.document import Document
from app.prompt.marks import BrokenMarksError, Marks
from engine_ext.client.request import CacheOptions, Ticket

NONCE = re.compile(r"\[tessera-([0-9a-f]{32})-")
FAKE = f"[tessera-{'0' * 32}-question]"


def ticket(*ids: str | None) -> Ticket:
    return Ticket(CacheOptions(), ids)


def issued(marks: Marks, *texts: str):
    mine = ticket(*[None] * len(texts))
    return mine, marks.issue(mine, [Document(text) for text in texts])


def test_marks_have_a_nonce_and_are_known_while_their_request_is_rendered_only():
    marks, nonces = Marks(), []
    for _ in range(3):
        with issued(marks, "same")[1] as marked:
            nonces += NONCE.findall(marked)
    assert [nonces.count(nonce) for nonce in nonces] == [2] * 6  # the chunk's and the question's
    with issued(marks, "one")[1] as marked:
        assert marks.are_in(f"text {marked} text")
        assert not marks.are_in("text")
        assert not Marks().are_in(marked)
    assert not marks.are_in(marked)
    with pytest.raises(RuntimeError), issued(marks, "one")[1] as marked:
        raise RuntimeError
    assert not marks.are_in(marked)


@pytest.mark.parametrize(
    "fake", [FAKE, FAKE.replace("question", "chunk"), "[tessera--question]", FAKE[:40] + "[tessera-"]
)
def test_text_that_only_looks_like_a_mark_stays_text(fake):
    marks = Marks()
    with issued(marks, "old")[1] as expired:
        pass
    for text in (fake, expired):
        with issued(marks, f"one {text} more")[1] as marked:
            split = marks.split(f"{text}{marked}{text}why?")
        assert (split.system, split.chunks, split.question) == (text, (f"one {text} more\n\n",), f"{text}why?")


def test_requests_rendered_at_once_do_not_mix():
    marks = Marks()
    (one, issue_one), (other, issue_other) = issued(marks, "one"), issued(marks, "other")
    with issue_one as marked_one, issue_other as marked_other:
        assert marks.split(marked_other).ticket is other
        assert marks.split(marked_one).ticket is one
        with pytest.raises(BrokenMarksError):
            marks.split(marked_one + marked_other)


@pytest.mark.parametrize(
    "break_marks",
    [
        lambda marked: marked + marked,
        lambda marked: "",
        lambda marked: marked[: marked.rindex("[")],  # no question
        lambda marked: marked[marked.index("]") + 1 :],  # the first chunk without its mark
        lambda marked: marked[marked.rindex("[") :] + marked[: marked.rindex("[")],  # the question first
        lambda marked: marked.upper(),
    ],
)
def test_repeated_dropped_or_reordered_marks_are_an_error(break_marks):
    marks = Marks()
    with issued(marks, "one", "two")[1] as marked, pytest.raises(BrokenMarksError, match="the chat template"):
        marks.split(break_marks(marked))


pieces = st.sampled_from([FAKE, "[tessera-", "-chunk]", "]", "[", "0" * 32, "<|im_start|>"])
texts = st.lists(st.one_of(st.text(max_size=8), pieces), min_size=1, max_size=6).map("".join)


@given(st.lists(texts, max_size=4), texts, texts)
@settings(derandomize=True, deadline=None)
def test_any_text_survives_the_round_trip(contents, system, question):
    marks = Marks()
    documents = [Document(content) for content in contents]
    mine = ticket(*[None] * len(contents))
    with marks.issue(mine, documents) as marked:
        split = marks.split(system + marked + question)
    assert split.ticket is mine
    assert (split.system, split.question) == (system, question)
    assert list(split.chunks) == [document.render() for document in documents]
    assert split.text == system + "".join(split.chunks) + question
