# SPDX-License-Identifier: Apache-2.0
"""Files are read in processes that go from one to the next, and that end with a file at fault alone."""

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import suppress

import pytest

from app.documents import extraction
from app.documents.extraction import Extraction
from app.documents.readers import READERS, UnreadableFileError
from tests.app.documents.files import docx, paragraph
from tests.app.pdfs import make_pdf
from tests.support.words import TOKENIZER


@pytest.fixture
def reader() -> Iterator[Extraction]:
    made = Extraction(TOKENIZER)
    yield made
    made.close()


def processes(reader: Extraction) -> set[int]:
    return {process.pid for process in reader._running}


async def test_one_process_reads_many_files(reader: Extraction) -> None:
    (piece,) = await reader.split(make_pdf(["One."], ["Two."]), "a.pdf", 50)
    assert (piece.text, piece.num_tokens, piece.page) == ("One.\n\nTwo.", 2, 1)
    first = processes(reader)
    for number in range(20):
        assert [each.title for each in await reader.split(b"# %d\n\na" % number, "a.md", 50)] == [str(number)]
    assert processes(reader) == first
    assert len(first) == 1


async def test_files_at_once_get_their_own_answers(reader: Extraction) -> None:
    found = await asyncio.gather(*(reader.split(b"text %d" % i, "a.txt", 50) for i in range(40)))
    assert [[each.text for each in pieces] for pieces in found] == [[f"text {i}"] for i in range(40)]
    assert len(processes(reader)) == 2


async def test_damaged_files_fail_alone(reader: Extraction) -> None:
    for name, file in {"a.pdf": b"%PDF", "a.docx": b"PK", "a.epub": b"PK", "a.ipynb": b"[]", "a.xyz": b"x"}.items():
        with pytest.raises(UnreadableFileError):
            await reader.split(file, name, 50)
        assert [each.text for each in await reader.split(b"text", "a.txt", 50)] == ["text"]
    assert len(processes(reader)) == 1


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT, signal.SIGKILL])
async def test_a_process_that_ends_is_replaced(reader: Extraction, number: signal.Signals) -> None:
    await reader.split(b"text", "a.txt", 50)
    (before,) = processes(reader)
    os.kill(before, number)
    with pytest.raises(UnreadableFileError, match=r"breaks its reader|takes longer"):
        await reader.split(b"x " * (1 << 20), "a.txt", 50)
    assert [each.text for each in await reader.split(b"text", "a.txt", 50)] == ["text"]
    assert before not in processes(reader)


@pytest.mark.parametrize(
    ("limits", "message"),
    [({"MAX_SECONDS": 1}, "takes longer than 1 s"), ({"MAX_MEMORY_BYTES": 600 << 20}, "GiB of memory")],
    ids=["time", "memory"],
)
async def test_a_file_beyond_the_limits_fails_alone(
    reader: Extraction, monkeypatch: pytest.MonkeyPatch, tmp_path, limits: dict[str, int], message: str
) -> None:
    """The limits are set in the process: a module that it imports first lowers them there."""
    lowered = "\n".join(f"extraction.{name} = {value}" for name, value in limits.items())
    for name, value in limits.items():
        monkeypatch.setattr(extraction, name, value)
    (tmp_path / "lowered.py").write_text(f"from app.documents import extraction\n{lowered}\nextraction._main()\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setattr(extraction, "_MODULE", "lowered")
    with pytest.raises(UnreadableFileError, match=message):
        await reader.split(b"<p>a<td>b<b>" * (1 << 21), "a.html", 50)
    assert [each.text for each in await reader.split(b"text", "a.txt", 50)] == ["text"]


async def test_two_runs_give_the_same(reader: Extraction) -> None:
    other = Extraction(TOKENIZER)
    files = {"a.docx": docx(paragraph("Pump", "Heading1") + paragraph("Blue.")), "a.pdf": make_pdf(["One."], ["Two."])}
    try:
        for name, file in files.items():
            assert await reader.split(file, name, 50) == await other.split(file, name, 50)
    finally:
        other.close()


async def test_each_type_has_a_reader(reader: Extraction) -> None:
    """None takes the process along, whatever the bytes are."""
    for suffix in READERS:
        for file in (b"", b"text", b"PK\x03\x04", bytes(range(256)) * 9):
            with suppress(UnreadableFileError):
                await reader.split(file, f"a{suffix}", 50)
    assert len(processes(reader)) == 1


async def test_nothing_runs_after_the_end() -> None:
    reader = Extraction(TOKENIZER)
    await reader.split(b"text", "a.txt", 50)
    (process,) = reader._running
    reader.close()
    assert process.poll() is not None


async def test_the_event_loop_goes_on_while_a_large_file_is_read(reader: Extraction) -> None:
    """Counted in turns of the loop, not in seconds: the machine may be busy."""
    await reader.split(b"text", "a.txt", 50)
    turns = 0

    async def turn() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0.001)

    turning = asyncio.create_task(turn())
    assert len(await reader.split(b"word word word. " * (1 << 16), "a.txt", 256)) > 700
    turning.cancel()
    assert turns > 50
