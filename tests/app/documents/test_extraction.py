# SPDX-License-Identifier: Apache-2.0
"""Files are read in processes that go from one to the next, and that end with a file at fault alone."""

import asyncio
import os
import signal
from contextlib import closing, suppress

import pytest

from app.documents import extraction
from app.documents.extraction import Extraction
from app.documents.readers import READERS, UnreadableFileError
from engine_ext.client.processes import StoppedError
from tests.app.documents.files import docx, paragraph
from tests.app.pdfs import make_pdf
from tests.support.loops import longest_pause
from tests.support.waiting import eventually
from tests.support.words import TOKENIZER


@pytest.fixture
def reader():
    made = Extraction(TOKENIZER)
    yield made
    made.close()


def processes(reader: Extraction) -> set[int]:
    return {process.pid for process in reader._processes._running}


async def test_one_process_reads_many_files(reader):
    (piece,) = await reader.split(make_pdf(["One."], ["Two."]), "a.pdf", 50)
    assert (piece.text, piece.num_tokens, piece.page) == ("One.\n\nTwo.", 2, 1)
    first = processes(reader)
    for number in range(20):
        assert [each.title for each in await reader.split(b"# %d\n\na" % number, "a.md", 50)] == [str(number)]
    assert processes(reader) == first
    assert len(first) == 1


async def test_files_at_once_get_their_own_answers(reader):
    found = await asyncio.gather(*(reader.split(b"text %d" % i, "a.txt", 50) for i in range(40)))
    assert [[each.text for each in pieces] for pieces in found] == [[f"text {i}"] for i in range(40)]
    assert len(processes(reader)) == 2
    with closing(Extraction(TOKENIZER)) as other:
        for name, file in {
            "a.docx": docx(paragraph("Pump", "Heading1")),
            "a.pdf": make_pdf(["One."], ["Two."]),
        }.items():
            assert await reader.split(file, name, 50) == await other.split(file, name, 50)
        (process,) = other._processes._running
    assert process.poll() is not None


async def test_damaged_files_fail_alone(reader):
    """None takes the process along, whatever its type and bytes are."""
    for suffix in READERS:
        for file in (b"", b"text", b"PK\x03\x04", bytes(range(256)) * 9):
            with suppress(UnreadableFileError):
                await reader.split(file, f"a{suffix}", 50)
        assert [each.text for each in await reader.split(b"text", "a.txt", 50)] == ["text"]
    with pytest.raises(UnreadableFileError):
        await reader.split(b"%PDF", "a.pdf", 50)
    with pytest.raises(UnreadableFileError):
        await reader.split(b"text", "a.xyz", 50)
    assert len(processes(reader)) == 1


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT, signal.SIGKILL])
async def test_a_process_that_ends_is_replaced(reader, number):
    await reader.split(b"text", "a.txt", 50)
    (before,) = processes(reader)
    os.kill(before, number)
    (process,) = reader._processes._running
    process.wait()
    assert [each.text for each in await reader.split(b"text", "a.txt", 50)] == ["text"]
    assert before not in processes(reader)


async def test_a_process_that_ends_amid_its_work_fails_its_file_alone(reader):
    await reader.split(b"text", "a.txt", 50)
    (process,) = reader._processes._running
    reading = asyncio.create_task(reader.split(b"word word word. " * (1 << 20), "a.txt", 50))
    await asyncio.sleep(0.1)
    process.kill()
    with pytest.raises(UnreadableFileError, match=r"breaks its reader"):
        await reading
    assert [each.text for each in await reader.split(b"text", "a.txt", 50)] == ["text"]


@pytest.mark.parametrize(
    ("limits", "message"),
    [({"MAX_SECONDS": 1}, "takes longer than 1 s"), ({"MAX_MEMORY_BYTES": 600 << 20}, "GiB of memory")],
    ids=["time", "memory"],
)
async def test_a_file_beyond_the_limits_fails_alone(reader, monkeypatch, tmp_path, limits, message):
    """The limits are set in the process: a module that it imports first lowers them there."""
    lowered = "\n".join(f"extraction.{name} = {value}" for name, value in limits.items())
    program = f"from app.documents import extraction\n{lowered}\nextraction.answer_all(extraction._prepare)\n"
    for name, value in limits.items():
        monkeypatch.setattr(extraction, name, value)
    (tmp_path / "lowered.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setattr(reader._processes, "_module", "lowered")
    with pytest.raises(UnreadableFileError, match=message):
        await reader.split(b"<p>a<td>b<b>" * (1 << 21), "a.html", 50)
    assert [each.text for each in await reader.split(b"text", "a.txt", 50)] == ["text"]


async def test_a_server_that_stops_is_no_fault_of_the_files_that_it_reads_or_that_wait(reader):
    await reader.split(b"text", "a.txt", 50)
    reading = [asyncio.create_task(reader.split(b"<p>a<td>b<b>" * (1 << 21), "a.html", 50)) for _ in range(4)]
    await eventually(lambda: len(processes(reader)) == 2)
    reader.close()
    assert [type(each) for each in await asyncio.gather(*reading, return_exceptions=True)] == [StoppedError] * 4
    with pytest.raises(StoppedError):
        await reader.split(b"text", "a.txt", 50)
    assert not processes(reader)


async def test_the_event_loop_goes_on_while_a_large_file_is_read(reader):
    await reader.split(b"text", "a.txt", 50)
    pause, pieces = await longest_pause(reader.split(b"word word word. " * (1 << 16), "a.txt", 256))
    assert len(pieces) > 700
    assert pause < 0.5


async def test_a_process_that_cant_start_is_no_fault_of_a_file(reader, monkeypatch):
    monkeypatch.setattr(reader._processes, "_module", "nowhere")
    with pytest.raises(RuntimeError, match="before it was asked"):
        await reader.split(b"text", "a.txt", 50)
    assert not processes(reader)
