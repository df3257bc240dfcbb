# SPDX-License-Identifier: Apache-2.0
"""Reading JSON records, and the words for what is wrong with the file itself."""

import pytest

from measuring.quality.questions.records import QuestionFileError, read_records


@pytest.fixture
def read(tmp_path):
    def read(content: str | bytes) -> list:
        file = tmp_path / "questions.jsonl"
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        return [(record.place.removeprefix(f"{tmp_path}/"), record.value) for record in read_records(file)]

    return read


def test_lines_are_counted_with_the_blank_ones(read):
    assert read('{"a": 1}\n\n  \r\n{"a": 2}\r\n') == [
        ("questions.jsonl, line 1", {"a": 1}),
        ("questions.jsonl, line 4", {"a": 2}),
    ]


def test_an_array_has_records(read):
    assert read('\n[{"a": 1},\n {"a": 2}]') == [
        ("questions.jsonl, record 1", {"a": 1}),
        ("questions.jsonl, record 2", {"a": 2}),
    ]


def test_a_byte_order_mark_is_no_content(read):
    assert read(b'\xef\xbb\xbf{"a": 1}') == [("questions.jsonl, line 1", {"a": 1})]


@pytest.mark.parametrize("separator", ["\u2028", "\u0085"])
def test_unicode_line_separators_do_not_end_a_line(read, separator):
    ((_, value),) = read(f'{{"a": "x{separator}y \\ud83d\\ude00"}}')
    assert value == {"a": f"x{separator}y 😀"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "questions.jsonl: has no questions in it"),
        (" \n\n", "questions.jsonl: has no questions in it"),
        ("[]", "questions.jsonl: has no questions in it"),
        (b'{"a": 1}\n{"a": "\xff"}', "questions.jsonl, line 2: is not UTF-8"),
        (b"\xef\xbb\xbf{}\n\n\xff", "questions.jsonl, line 3: is not UTF-8"),
        ('{"a": 1}\n{"a": ', "questions.jsonl, line 2: invalid JSON at column 7: Expecting value"),
        ('{"a": 1} {"a": 2}', "questions.jsonl, line 1: invalid JSON at column 10: Extra data"),
        ('[{"a": 1},\n{"a" 2}]', "questions.jsonl: invalid JSON at line 2, column 6: Expecting ':' delimiter"),
        ('{"a": "\\ud83d"}', "questions.jsonl, line 1: invalid JSON: a string has half of a surrogate pair"),
        ('{"a": ' * 200_000, "questions.jsonl, line 1: invalid JSON: nested too deeply"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_is_wrong_with_a_file(read, content, message, tmp_path):
    with pytest.raises(QuestionFileError) as raised:
        read(content)
    assert str(raised.value).removeprefix(f"{tmp_path}/").startswith(message)


def test_a_missing_file(tmp_path):
    with pytest.raises(QuestionFileError, match=r"none\.jsonl: No such file or directory"):
        read_records(tmp_path / "none.jsonl")


def test_a_folder(tmp_path):
    with pytest.raises(QuestionFileError, match="Is a directory"):
        read_records(tmp_path)
