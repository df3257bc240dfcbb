# SPDX-License-Identifier: Apache-2.0
"""Words of passages and questions meet however either is written."""

import itertools
import unicodedata

import pytest

from app.collections.words import words_of
from tests.support.cpu_time import cpu_seconds

MEETINGS = {
    "ligatures, accents and cases": [
        *(("the ﬁlter of the oﬃce", "filter office"), ("Cafe\N{COMBINING ACUTE ACCENT} Zoë", "CAFÉ zoe")),
        *(("Straße", "STRASSE"), ("Łódź, Đà Nẵng, Smørrebrød, Æther, cœur", "lodz da nang smorrebrod aether coeur")),
        *(("İSTANBUL", "istanbul"), ("ISPARTA", "ısparta"), ("１２３４ ＡＢＣ", "1234 abc"), ("IT", "it")),
    ],
    "breaks within words": [
        *(("an infor\N{SOFT HYPHEN}mation desk", "information"), ("an infor-\n  mation desk", "information")),
        *(("an infor\N{HYPHEN}\r\nmation desk", "information"), ("an infor-\n\nmation desk", "information")),
        ("an infor\N{SOFT HYPHEN}\nmation desk", "information"),
        ("zero\N{ZERO WIDTH SPACE}width, \N{WORD JOINER}joined", "zerowidth joined"),
    ],
    "identifiers": [
        *(("PUMP_MAX_PRESSURE", "pump_max_pressure"), ("PUMP_MAX_PRESSURE", "the max pressure of a pump")),
        *(("pumpMaxPressure", "PUMP_MAX_PRESSURE"), ("HTTPProxy", "http proxy"), ("E-1042/b", "e-1042/B")),
        *(("E\N{NON-BREAKING HYPHEN}1042/b", "E-1042/b"), ("E1042", "E-1042"), ("E-1042", "1042")),
        *(("an e-mail", "email"), ("don’t", "don't")),
    ],
    "numbers and dates": [
        *(("call 555-0199", "5550199"), ("version 1.2.3", "1.2.3"), ("320,000", "320000"), ("320.000", "320,000")),
        *(("1 234 567 km, 1\u202f234\u00a0km", word) for word in ("1234567", "1,234", "1.234.567")),
        *(("€ 1,234.50", "1234.50"), ("1.234,50 €", "1234,50"), ("1 234,50 €", "1234")),
        *(("320'000", "320000"), ("on 2024-03-15", "2024/03/15"), ("on 15.03.2024", "2024")),
    ],
    "addresses, languages and exponents": [
        *(("anna.schmidt@example.org", "schmidt"), ("anna.schmidt@example.org", "ANNA.SCHMIDT@EXAMPLE.ORG")),
        *(("written in C++", "c++"), ("written in C#", "C#"), ("10⁶ litres", "10^6")),
    ],
    "Arabic, Devanagari, Thai, Cyrillic and Greek": [
        *(("٣٢٠ متر", "320"), ("३२० मीटर", "320"), ("๓๒๐ เมตร", "320"), ("كِتَابٌ جديد", "كتاب")),
        *(("الكتـــاب", "الكتاب"), ("ёлка", "елка"), ("Ελλάδα", "ελλαδα"), ("पुस्तकालय खुलता है", "पुस्तकालय")),
        *(("हिन्दी", "हिंदी"), ("गाँव", "गांव"), ("ज़रूरत", "जरूरत"), ("کتاب فارسی", "كتاب"), ("مدرسة", "مدرسه")),
    ],
    "languages without spaces": [
        *(
            ("猫头鹰在夜间捕猎。", "猫头鹰"),
            ("猫头鹰在夜间捕猎。", "猫"),
            ("東京都の図書館は午前九時に開きます。", "図書館"),
            ("ｶﾞｽの元栓", "ガス"),
        ),
        *(
            ("ห้องสมุดเปิดวันอังคาร", "ห้องสมุด"),
            ("전화번호는 7342입니다", "전화 번호"),
            ("전화 번호는 7342입니다", "전화번호"),
        ),
        *(("서울에서", "서울"), ("参数PUMP_MAX_PRESSURE", "pump_max_pressure"), ("型号E-1042/b的水泵", "E-1042/b")),
    ],
}


@pytest.mark.parametrize("kind", MEETINGS)
def test_a_question_meets_the_passage(kind):
    for (written, asked), form in itertools.product(MEETINGS[kind], ("NFC", "NFD")):
        assert set(words_of(asked)) & set(words_of(unicodedata.normalize(form, written))), written
        assert set(words_of(unicodedata.normalize(form, asked))) & set(words_of(written)), written


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        *(("PUMP_MAX_PRESSURE", "pumpmaxpressure"), ("pumpMaxPressure", "pumpmaxpressure"), ("E-1042/b", "e1042b")),
        *(("1.2.3", "1.2.3"), ("2024-03-15", "2024.03.15"), ("info@example.org", "infoexampleorg")),
        *(("C++", "c++"), ("IT", "IT")),
    ],
)
def test_an_identifier_is_a_word_of_its_own(text, whole):
    """So that the passage with just this one is before those with its parts."""
    assert words_of(text)[0] == whole


@pytest.mark.parametrize(
    ("one", "other"),
    [("1.2.3", "12.3"), ("2½", "21"), ("10⁶", "106"), ("IT", "it"), ("C", "C++"), ("मीटर", "मटर"), ("अन्न", "अंन")],
)
def test_what_differs_stays_different(one, other):
    assert words_of(one) != words_of(other)


@pytest.mark.parametrize("text", ["", " \n", "?!…", "😀", "--- ___", "\N{SOFT HYPHEN}", "\ud800"])
def test_text_without_words_has_none(text):
    assert words_of(text) == []


def test_base64_is_no_word():
    for data in ("QUJDRA" * 5000, "qujdra" * 5000, "quJDra9" * 5000, "1" * 5000):
        assert max(map(len, words_of(data)), default=0) <= 64


SHAPES = [
    "a",
    "a-",
    "A",
    "aA",
    "-\n",
    "ก",
    "猫",
    "a\N{COMBINING ACUTE ACCENT}",
    "1,",
    "1.0",
    "100 ",
    "1 ",
    "न्",
    "가",
    "\ud800",
    "é",
    "٣",
]


@pytest.mark.parametrize("shape", SHAPES, ids=ascii)
def test_time_grows_with_the_length(shape):
    """A question is as long as its client makes it."""
    words_of(shape * 1000)
    short, long = (cpu_seconds(words_of, shape * (length // len(shape))) for length in (50_000, 200_000))
    assert long < 4 * 3 * short + 0.05
