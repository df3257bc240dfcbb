# SPDX-License-Identifier: Apache-2.0
"""Texts are split into documents of bounded length without loss."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.documents.readers import Text, read
from app.documents.splitting import split
from tests.support.words import words


def pieces(text, max_tokens=50, count=words, **fields):
    """Pieces, after a check that they are where they say."""
    found = list(split(Text(text, **fields), max_tokens, count))
    assert [text[each.start : each.end] for each in found] == [each.text for each in found]
    assert all(before.end <= after.start for before, after in itertools.pairwise(found))
    return found


def texts(*args, **kwargs):
    return [each.text for each in pieces(*args, **kwargs)]


def titled(text, max_tokens=50):
    return [(each.title, each.text) for each in pieces(text, max_tokens, is_markdown=True)]


@pytest.mark.parametrize(
    ("text", "max_tokens", "expected"),
    [
        ("One two.\n\nThree.", 10, ["One two.\n\nThree."]),
        ("a b c\n\nd e f\n  \n\ng h i\n\nj", 6, ["a b c\n\nd e f", "g h i\n\nj"]),
        ("A b c d. E f g h. I j k l. M.", 9, ["A b c d. E f g h.", "I j k l. M."]),
        ("a b c d e f", 3, ["a b c", "d e f"]),
        ("a b\n\n\n    c d\n      e", 3, ["a b", "    c d\n      e"]),
        (" \n\n ", 9, []),
    ],
)
def test_a_text_is_cut_where_people_pause(text, max_tokens, expected):
    assert texts(text, max_tokens) == expected


@pytest.mark.parametrize(
    "sentences",
    [
        ["桥长三百二十米。", "它建于一九八七年。", "两万辆汽车通过！", "谁造的？", "是艾达；"],
        ["橋は三百二十メートルです。", "「そうですか？」", "はい！"],
        ["पुल तीन सौ मीटर लंबा है। ", "इसे किसने बनाया? "],
        ["Is it long?\n", "It is. ", "“Yes!” ", "(See above.) "],
    ],
)
def test_sentences_of_all_scripts_stay_whole(sentences):
    whole = [sentence.strip() for sentence in sentences] * 9
    found = texts("".join(sentences * 9), 40, lambda document: len(document.text))
    assert len(found) > 3
    assert all(any(text.endswith(sentence) for sentence in whole) for text in found)


def test_lines_of_lists_tables_and_code_stay_whole():
    rows = "".join(f"| pump {i} | It costs {i} euros. Really. |\n" for i in range(50))
    assert all(text.endswith("|") and text.startswith("| pump") for text in texts(rows, 40))
    code = "".join(f"    send('Hello. World {i}')\n" for i in range(50))
    assert all(text.endswith("')") and text.startswith("    send") for text in texts(code, 10))


def test_a_text_without_pauses_is_cut_anywhere_but_within_what_people_see_as_one_character():
    family = "👩‍👩‍👧"
    assert all(text == family * (len(text) // len(family)) for text in texts(family * 99, 16, lambda d: len(d.text)))
    found = pieces("x" * 1000, 100, lambda document: len(document.text))
    assert "".join(each.text for each in found) == "x" * 1000
    assert max(each.num_tokens for each in found) <= 100


def test_pieces_are_filled_whatever_the_characters_of_a_token():
    for text in ("antidisestablishmentarianism " * 300, "a " * 3000, "a b c d e f g h.\n" * 300):
        *full, _ = pieces(text, 64)
        assert min(each.num_tokens for each in full) > 48


def test_pages_are_those_that_pieces_begin_on():
    pages = ["Pump manual\n\nIt has a lid.\n\n", "\n\n", "Pump manual\n\nIt is blue.\n\n", "Pump manual"]
    starts = [0, *itertools.accumulate(map(len, pages[:-1]))]
    found = pieces("".join(pages), 4, page_starts=starts)
    assert [each.text for each in found] == [
        "Pump manual",
        "It has a lid.",
        "Pump manual",
        "It is blue.",
        "Pump manual",
    ]
    assert [each.page for each in found] == [1, 1, 3, 3, 4]
    assert {each.page for each in pieces("No pages.")} == {None}


@pytest.mark.parametrize(
    ("text", "titles"),
    [
        ("# C#\n\na", ["C#"]),
        ("# A *b* `c` #\n\na", ["A b c"]),
        ("# See [the *docs*](http://x/y) ![logo](z)\n\na", ["See the docs logo"]),
        ("# <a name='x'></a>Install\n\na", ["Install"]),
        ("# AT&amp;T \\# C\\# foo_bar_baz\n\na", ["AT&T # C# foo_bar_baz"]),
        ("---\n# made by hand\n\ntitle: x\n---\n# A\n\na", [None, "A"]),
        ("Setup\n=====\n\na\n\nUse\nit\n---\n\nb", ["Setup", "Setup › Use it"]),
        ("#hashtag\n\n    # code\n\na", [None]),
        ("# A\n\n```sh install```\n\n# B\n\nb", ["A", "B"]),
        ("# A\n\n````md\n```\n# no\n```\n# no\n````\n\n# B\n\nb", ["A", "B"]),
        ("# A\n\n~~~\n```\n# no\n~~~\n# B\n\nb", ["A", "B"]),
        ("# A\n\n> > ```\n> > # no\n> > ```\n>\n> # quoted\n\n# B\n\nb", ["A", "B"]),
        ("# A\n\n- x\n\n  # in a list\n\n# B\n\nb", ["A", "B"]),
        ("# A\n\n<div>\n# no\n</div>\n\n# B\n\nb", ["A", "B"]),
        ("---\ntitle: x\nn: 1\n---\n\n# A\n\na", [None, "A"]),
        ("---\nLast updated: 2024\n---\n\n# A\n\na", [None, "A"]),
        ("+++\ntitle = 'x'\n# comment\n+++\n# A\n\na", [None, "A"]),
        ("---\n\n# A\n\na\n\n---\n\nb", [None, "A"]),
        ("# A\n\na\n\n[link]: http://x\n---\nb", ["A"]),
        ("# A\n\na\n\n#### Deep\n\nb\n\n## C\n\nc", ["A", "A › Deep", "A › C"]),
        ("#   A \t  b   \n\na", ["A b"]),
        ("#\n\na", [None]),
    ],
)
def test_headings_are_those_of_commonmark(text, titles):
    assert [title for title, _ in titled(text)] == titles


@pytest.mark.parametrize(
    ("text", "max_tokens", "expected"),
    [
        ("Before.\n\n# Guide\n## Setup ##\nInstall.", 50, [(None, "Before."), ("Guide › Setup", "Install.")]),
        ("# A\n## B\n```\n# no\n```\n## C\nc\n# D\nd", 50, [("A › B", "```\n# no\n```"), ("A › C", "c"), ("D", "d")]),
        ("---\ntitle: Pump\n---\n# A\n\na", 50, [(None, "---\ntitle: Pump\n---"), ("A", "a")]),
        ("# Emergency: 4711\n\n# Other\n\nCall.", 50, [(None, "Emergency: 4711"), ("Other", "Call.")]),
        ("## How long?\n#### 320 m.\n## Who?\n#### Ada.\n", 50, [("How long?", "320 m."), ("Who?", "Ada.")]),
        ("# One\n\n# Two\n \n", 50, [(None, "One"), (None, "Two")]),
        ("# a very long heading indeed\n## Short\ntext", 6, [("Short", "text")]),  # no room for the outer heading
        ("# a very long heading indeed\ntext", 9, [(None, "# a very long heading indeed\ntext")]),
        ("\n \n\n", 50, []),
    ],
)
def test_headings_become_titles(text, max_tokens, expected):
    assert titled(text, max_tokens) == expected
    found = pieces("# T U\na b c d e f", 5, is_markdown=True)
    assert max(each.num_tokens for each in found) <= 5  # a title counts
    assert {each.title for each in found} == {"T U"}


def test_tags_that_people_see_are_words():
    page = b"<h1>The &lt;b&gt; tag</h1>&lt;script&gt; runs.<h2>Next</h2>&lt;!-- x<h2>Last</h2>y"
    found = split(read(page, "a.html"), 50, words)
    assert [each.title for each in found] == ["The <b> tag", "The <b> tag › Next", "The <b> tag › Last"]


@given(st.text(alphabet="ab .\n#`>-|\t。\u3000é", max_size=300), st.integers(4, 20), st.booleans())
def test_no_word_is_lost_and_no_piece_is_too_long(text, max_tokens, is_markdown):
    found = pieces(text, max_tokens, is_markdown=is_markdown)
    assert all(each.num_tokens <= max_tokens for each in found)
    if is_markdown:  # headings are in titles, once for each piece below them
        kept = set("".join(f"{each.title or ''}{each.text}" for each in found))
        assert {each for each in text if each.isalpha() or each == "。"} <= kept
    else:
        assert "".join("".join(each.text.split()) for each in found) == "".join(text.split())
