# SPDX-License-Identifier: Apache-2.0
"""A folder of files of all types, some damaged, is ingested whole, however often server and command are killed.

The server has no engine: it reads, splits and stores files as the real one does, but computes nothing.
"""

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import psutil
import pytest

from app.collections.store import Collections
from app.documents.readers import READERS
from machine.server_process import ROOT, free_port
from tests.app.documents.files import docx, epub, message, paragraph, pptx, shape, xhtml, xlsx
from tests.app.pdfs import make_pdf
from tests.processes import started

pytestmark = pytest.mark.matrix

FILES = 10_000
DAMAGED_EVERY = 100
MOST_MEMORY_BYTES = 2 << 30

MADE: dict[str, Callable[[str], bytes | str]] = {
    ".html": lambda text: f"<h1>Pump</h1><p>{text}",
    ".xhtml": lambda text: xhtml(f"<p>{text}</p>"),
    ".csv": lambda text: f"a,b\n1,{text}\n",
    ".tsv": lambda text: f"a\tb\n1\t{text}\n",
    ".pdf": lambda text: make_pdf(["Pump"], [text]),
    ".docx": lambda text: docx(paragraph("Pump", "Heading1") + paragraph(text)),
    ".pptx": lambda text: pptx(shape("Pump", "title") + shape(text)),
    ".xlsx": lambda text: xlsx(
        A=f'<sheetData><row r="1"><c r="A1" t="inlineStr"><is><t>{text}</t></is></c></row></sheetData>'
    ),
    ".epub": lambda text: epub({"a.xhtml": xhtml(f"<p>{text}</p>")}, ["a.xhtml"]),
    ".eml": lambda text: message("Pump", text),
    ".ipynb": lambda text: json.dumps({"cells": [{"cell_type": "markdown", "source": text}]}),
    ".rtf": lambda text: rf"{{\rtf1\ansi {text}\par}}",
}
"""A file's content; of other types it is the text."""
DAMAGED: dict[str, Callable[[bytes], bytes]] = {
    **dict.fromkeys((".pdf", ".docx", ".pptx", ".xlsx", ".epub", ".ipynb"), lambda content: content[:50]),
    **dict.fromkeys((".html", ".htm", ".xhtml", ".eml"), lambda _: b""),
    ".rtf": lambda content: content[1:],
}
"""How some types are damaged; files of all others begin with a zero byte."""


def write_files(folder: Path) -> tuple[set[str], set[str]]:
    """Writes files of all types; returns the names of the good and of the damaged ones."""
    good, damaged = set(), set()
    for number, suffix in zip(range(FILES), itertools.cycle(READERS), strict=False):
        made = MADE.get(suffix, lambda text: text)(f"The pump is called marked-{number:05d}.")
        content = made.encode() if isinstance(made, str) else made
        name = f"{number // 500:02d}/{number:05d}{suffix}"
        is_damaged = number % DAMAGED_EVERY == 7
        if is_damaged:
            content = DAMAGED.get(suffix, lambda content: b"\0" + content)(content)
        (damaged if is_damaged else good).add(name)
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    return good, damaged


@contextmanager
def serving(collections: Path, port: int) -> Iterator["subprocess.Popen[bytes]"]:
    with started([sys.executable, "-m", "tests.support.engineless", str(collections), str(port)], cwd=ROOT) as server:
        while True:
            assert server.poll() is None
            with suppress(httpx.ConnectError):
                assert httpx.get(f"http://127.0.0.1:{port}/v1/rag/collections").status_code == 200
                break
            time.sleep(0.1)
        yield server


@contextmanager
def ingesting(folder: Path, port: int) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-m", "app.cli", "ingest", str(folder), "--collection", "all"]
    options = {"cwd": ROOT, "stderr": subprocess.PIPE, "text": True, "env": {**os.environ, "COLUMNS": "200"}}
    with started([*command, "--server", f"http://127.0.0.1:{port}"], **options) as ingestion:
        yield ingestion


def num_stored(collections: Collections) -> int:
    return sum(each["files"] for each in collections.summaries("default"))


def most_memory_bytes(server: "subprocess.Popen[bytes]") -> int:
    """The most that the server's processes have had, each at its time."""
    processes = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
    status = "".join(Path(f"/proc/{each.pid}/status").read_text() for each in processes)
    return 1024 * sum(map(int, re.findall(r"VmHWM:\s*(\d+)", status)))


def test_every_good_file_is_stored_once_and_each_damaged_one_reported(tmp_path: Path) -> None:
    folder, collections = tmp_path / "files", Collections(tmp_path / "collections")
    folder.mkdir()
    good, damaged = write_files(folder)
    assert {Path(name).suffix for name in good} == set(READERS)
    for most in (FILES // 3, 2 * FILES // 3):
        port = free_port()
        with serving(collections.root, port) as server, ingesting(folder, port) as ingestion:
            while num_stored(collections) < most:
                assert ingestion.poll() is None, ingestion.stderr.read()
                time.sleep(0.1)
            for process in (server, ingestion):
                process.send_signal(signal.SIGKILL)
    before = num_stored(collections)
    assert before < len(good)
    port = free_port()
    with serving(collections.root, port) as server, ingesting(folder, port) as ingestion:
        _, said = ingestion.communicate()
        assert most_memory_bytes(server) < MOST_MEMORY_BYTES
    failed = [line.split(": ")[2] for line in said.splitlines() if line.startswith("tessera: failed: ")]
    assert (ingestion.returncode, sorted(failed)) == (1, sorted(damaged))
    assert f"files: {len(good) - before} added, {len(damaged)} failed, {before} unchanged" in said
    corpus = collections.corpus("default", "all")
    assert set(corpus.files) == good
    marks = Counter(mark for passage in corpus.passages for mark in re.findall(r"marked-\d+", passage.text))
    assert marks == {f"marked-{Path(name).stem}": 1 for name in good}
