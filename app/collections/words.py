# SPDX-License-Identifier: Apache-2.0
"""Words of passages and questions: one normalization for both."""

import unicodedata
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import pairwise
from typing import Final

import regex
from icu4py.breakers import WordBreaker

_LONGEST: Final = 64
"""Characters of a word; longer ones are data, such as base64, and left out."""
_IGNORED: Final = regex.compile(r"[\p{Default_Ignorable_Code_Point}\N{ARABIC TATWEEL}]+")
_LINE_END: Final = regex.compile(
    r"(?<=\p{L}\p{M}*)[-\N{HYPHEN}\N{SOFT HYPHEN}][ \t]*\r?\n(?:[ \t]*(?=\p{L})|\s*(?=\p{Ll}))"
)
"""The hyphen of a word that goes on in the next line, or on the next page."""
_RAISED: Final = regex.compile(r"(?<=\p{Nd})(?=\p{No})")
"""Before an exponent or a fraction, which NFKC would join with its number: 10⁶ is not 106."""
_SPACED: Final = regex.compile(r"(?<![\w.,])\d{1,3}(?: \d{3})+(?!\w)")
"""A number with spaces between its thousands."""
_NASAL: Final = regex.compile("ङ्(?=[क-घ])|ञ्(?=[च-झ])|ण्(?=[ट-ढ])|न्(?=[त-ध])|म्(?=[प-भ])")
"""What Hindi writes as a dot too: हिन्दी is हिंदी."""
_OTHER_DIGIT: Final = regex.compile(r"[\p{Nd}--[0-9]]", flags=regex.V1)
_SPELLINGS: Final = str.maketrans({**dict.fromkeys("‐‑‒–−", "-"), **dict.fromkeys("‘’ʼ", "'"), "ँ": "ं"})
_JOINT: Final = r"[-_./\\:,'@&+=~]"
_RUN: Final = regex.compile(rf"[^\W_]+(?:{_JOINT}[^\W_]+)*(?:[+#]+(?!\w))?")
"""A word, number, name or address as it is written, such as C++; or text without spaces between words."""
_UNSPACED: Final = regex.compile(
    r"([[\p{Script_Extensions=Han}\p{Script_Extensions=Hiragana}\p{Script_Extensions=Katakana}"
    r"\p{Line_Break=Complex_Context}]&&[\p{L}\p{M}]]+)",
    flags=regex.V1,
)
_JOINTS: Final = regex.compile(rf"(?P<numbers>(?<=\d){_JOINT}(?=\d))|{_JOINT}(?=\w)")
_GROUPED: Final = regex.compile(r"(\d{1,3}(?:\.\d{3})+)(\.\d{1,2})?")
_PART: Final = regex.compile(
    r"\d+|(?:\p{Lu}\p{M}*)+(?=\p{Lu}\p{M}*\p{Ll})|(?:\p{Lu}\p{M}*)?(?:[[\p{L}\p{N}]--[\p{Lu}\d]]\p{M}*)+|(?:\p{Lu}\p{M}*)+",
    flags=regex.V1,
)
"""A part of an identifier: ``HTTP``, ``Proxy`` and ``12`` of ``HTTPProxy_12``."""
_STROKED: Final = {
    **str.maketrans({"đ": "d", "ð": "d", "ħ": "h", "ı": "i", "ł": "l", "ø": "o", "æ": "ae", "œ": "oe"}),
    **str.maketrans({"ی": "ي", "ى": "ي", "ک": "ك", "ة": "ه"}),
}
"""Letters that have no accent, but which many people write as if they had, or which another keyboard has."""
_HANGUL: Final = regex.compile(r"\p{Hangul}")
_ACCENTS: Final = frozenset({*range(1, 8), *range(10, 36), *range(200, 241)})
"""Combining classes of accents, dots and vowel points; those of other classes are letters of Indic and Thai words."""


def words_of(text: str) -> list[str]:
    """The words of a text: case, forms of characters, and hyphens at the ends of lines don't count.

    An identifier, a number or an accented word stands for itself, for its parts, and for itself without accents; a word
    in capitals also for just that (IT is not it); text in scripts without spaces for its words and their characters.
    """
    text = _IGNORED.sub("", _LINE_END.sub("", text))
    text = unicodedata.normalize("NFKC", _RAISED.sub(" ", text)).translate(_SPELLINGS)
    text = _OTHER_DIGIT.sub(lambda digit: str(unicodedata.decimal(digit[0])), _NASAL.sub("ं", text))
    text = _SPACED.sub(lambda number: number[0].replace(" ", "'"), text)
    words, unspaced = list[str](), list[str]()
    for run in _RUN.findall(text):
        if run.isascii() or not _UNSPACED.search(run):
            words.extend(_of_word(run))
        else:
            others = _UNSPACED.split(run)
            unspaced.extend(others[1::2])
            words.extend(word for other in others[::2] for word in words_of(other))
    if unspaced:
        words.extend(_of_unspaced("\n".join(unspaced)))
    return words


@lru_cache(1 << 16)
def _of_word(word: str) -> tuple[str, ...]:
    parts = _PART.findall(word)
    whole = _JOINTS.sub(lambda joint: "." if joint["numbers"] else "", word)
    wholes = [whole] if [whole] != parts else []
    if "." in whole and "-" in word:  # 555-0199
        wholes.append(whole.replace(".", ""))
    elif grouped := _GROUPED.fullmatch(whole):  # 1.000, 1.000,50
        thousands, decimals = grouped[1].replace(".", ""), grouped[2]
        wholes += [thousands, thousands + decimals] if decimals else [thousands]
    if _HANGUL.search(word):  # whose particles follow without a space, and whose compounds have one or not
        parts += [pair for part in parts if len(part) > 2 for pair in map("".join, pairwise(part))]
    acronym = [word] if len(word) > 1 and word.isalpha() and word.isupper() else []
    return tuple(form for form in (*acronym, *_forms([*wholes, *parts])) if len(form) <= _LONGEST)


def _of_unspaced(text: str) -> Iterator[str]:
    for segment in WordBreaker(text, "en"):
        word = str(segment).casefold()
        if word != "\n":
            yield word
            if len(word) > 1:
                yield from word


def _forms(words: Iterable[str]) -> Iterator[str]:
    """Words as they are compared, and without accents if they have any."""
    for word in words:
        folded = unicodedata.normalize("NFKC", word.casefold())
        yield folded
        if not folded.isascii():
            bare = "".join(c for c in unicodedata.normalize("NFD", folded) if unicodedata.combining(c) not in _ACCENTS)
            bare = unicodedata.normalize("NFC", bare).translate(_STROKED)
            if bare != folded:
                yield bare
