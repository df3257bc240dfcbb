# SPDX-License-Identifier: Apache-2.0
"""The size of JSON that counts for those who parse it: how many values it has, of which kinds, and how many bytes.

Parsing keeps all other threads waiting, and takes time and memory most of all by the value and by the name: 64 MB of
empty lists freeze a server for seconds, 8 MB of text don't.
"""

from collections.abc import Iterator
from typing import Final

MOST_BYTES: Final = 8 << 20
"""Of a body of JSON, whatever files may have: a character may take four bytes of memory."""
MOST_NAMES: Final = 1 << 15
"""Of all fields of a body."""
MOST_CONTAINERS: Final = 1 << 15
"""Arrays and objects of a body."""
MOST_VALUES: Final = 1 << 18
"""All values of a body: a prompt may be token ids."""
MOST_ESCAPES: Final = 1 << 20
"""Backslashes in a body, each of which takes ten times as long as another character."""
MOST_DIGITS: Final = 32
"""Of a number; those of long integers are multiplied one by one."""
_PART: Final = 1 << 16
_NINES: Final = bytes.maketrans(b"0123456789", b"9" * 10)
_LONG_NUMBER: Final = b"9" * (MOST_DIGITS + 1)


def is_too_complex(body: bytes) -> bool:
    """Whether a body has more values than a server parses. Call it in a thread: it lets others run in between.

    Any prefix is counted right for as long as it is JSON, which a parser doesn't read beyond.
    """
    escapes = body.count(b"\\")
    if escapes > MOST_ESCAPES or body.count(b'"') > 2 * (MOST_VALUES + MOST_NAMES) + escapes:
        return True
    containers, names, commas = 0, 0, 0
    for part in _outside_strings(body):
        containers += part.count(b"[") + part.count(b"{")
        names += part.count(b":")
        commas += part.count(b",")
        if containers > MOST_CONTAINERS or names > MOST_NAMES or containers + commas > MOST_VALUES:
            return True
        if _LONG_NUMBER in part.translate(_NINES):
            return True
    return False


def _outside_strings(body: bytes) -> Iterator[bytes]:
    """The text outside strings, a little at a time."""
    pieces, size = list[bytes](), 0
    for start, end in _spans(body):
        for at in range(start, end, _PART):
            pieces.append(body[at : min(at + _PART, end)])
            size += len(pieces[-1])
            if size >= _PART:
                yield b" ".join(pieces)
                pieces, size = [], 0
    yield b" ".join(pieces)


def _spans(body: bytes) -> Iterator[tuple[int, int]]:
    """The parts ``start, end`` that are in no string."""
    at, end = 0, len(body)
    while at < end:
        start = body.find(b'"', at)
        yield at, (start if start >= 0 else end)
        if start < 0:
            return
        at = _string_end(body, start + 1)


def _string_end(body: bytes, at: int) -> int:
    """Index behind the string that begins at ``at``."""
    while (quote := body.find(b'"', at)) >= 0:
        before = body[at:quote]
        at = quote + 1
        if (len(before) - len(before.rstrip(b"\\"))) % 2 == 0:
            return at
    return len(body)
