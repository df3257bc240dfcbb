# SPDX-License-Identifier: Apache-2.0
"""Reads and splits files in processes with limits, one file at a time in each; a file at fault fails alone.

Run as a program, it reads a tokenizer, then pairs of JSON and a file, from standard input. It answers a file with the
pieces, a list each, and an object. Each of these is behind its length.
"""

import asyncio
import json
import math
import os
import resource
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from app.documents.document import Document
from app.documents.document_tokenizer import DocumentTokenizer
from app.documents.readers import READERS, UnreadableFileError, has_ocr, read, suffix_of
from app.documents.splitting import Piece, split
from engine_ext.chunks.turns import FairTurns
from engine_ext.client.request import owner

MAX_SECONDS = 60
MAX_MEMORY_BYTES = 2 << 30
_TOO_MUCH_MEMORY: Final = f"takes more than {MAX_MEMORY_BYTES >> 30} GiB of memory"
_MAX_KEPT_BYTES: Final = 512 << 20
"""Memory of a process that reads another file."""
_MODULE = "app.documents.extraction"
_PROCESSES: Final = 2
_SLOWDOWN: Final = 5
"""Times the limit of CPU time that a file may take, on a busy machine."""
_OCR: Final = 10
"""Times the limit of CPU time, where scans are read."""
_LENGTH: Final = struct.Struct("<Q")


class Extraction:
    """Processes that split files by a tokenizer; started when needed, and used for one file after the other."""

    def __init__(self, tokenizer: str) -> None:
        self._tokenizer = tokenizer.encode()
        self._threads = ThreadPoolExecutor(_PROCESSES, "extraction")
        self._turns = FairTurns(_PROCESSES, most_of_one=_PROCESSES - 1)  # one tenant's files don't keep another's out
        self._running = set[subprocess.Popen[bytes]]()
        self._idle: list[subprocess.Popen[bytes]] = []

    async def split(self, file: bytes, name: str, max_tokens: int) -> list[Piece]:
        """The pieces of a file; raises :class:`UnreadableFileError`."""
        if suffix_of(name) not in READERS:
            raise UnreadableFileError(f"files of the type {suffix_of(name)!r} can't be read")
        about = {"name": name, "max_tokens": max_tokens}

        async def split() -> list[Piece]:
            return await asyncio.get_running_loop().run_in_executor(self._threads, self._split, file, about)

        return await self._turns.run(owner(), split)

    def close(self) -> None:
        """Ends the processes; files that they read fail."""
        for process in tuple(self._running):
            process.kill()
        self._threads.shutdown(cancel_futures=True)
        for process in tuple(self._running):
            self._end(process)

    def _split(self, file: bytes, about: dict[str, Any]) -> list[Piece]:
        process = self._idle.pop() if self._idle else self._started()
        watch = threading.Timer(_max_seconds(about["name"]) * _SLOWDOWN, process.kill)
        watch.start()
        try:
            *pieces, end = _asked(process, file, about)
        except (OSError, ValueError, struct.error) as error:  # the process has ended
            is_late = not watch.is_alive() or process.wait() == -signal.SIGXCPU
            self._end(process)
            late = f"takes longer than {_max_seconds(about['name'])} s"
            why = late if is_late else f"breaks its reader, or {_TOO_MUCH_MEMORY}"
            raise UnreadableFileError(f"reading this file {why}") from error
        finally:
            watch.cancel()
        if end.pop("is_last") or process.poll() is not None:
            self._end(process)
        else:
            self._idle.append(process)
        if end:
            raise UnreadableFileError(end["error"])
        return [Piece(*each) for each in pieces]

    def _started(self) -> subprocess.Popen[bytes]:
        root = str(Path(__file__).parents[2])
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", _MODULE],  # -P: the working folder's modules stay out
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))},
        )
        self._running.add(process)
        with suppress(OSError):  # whoever asks it finds out
            _write(process.stdin, self._tokenizer)
        return process

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        process.kill()
        process.communicate()
        self._running.discard(process)


def _asked(process: subprocess.Popen[bytes], file: bytes, about: dict[str, Any]) -> Iterator[Any]:
    """The process's answers to a file, the last an object."""
    _write(process.stdin, json.dumps(about).encode(), file)
    answer = None
    while not isinstance(answer, dict):
        answer = json.loads(_read(process.stdout))
        yield answer


def _write(stream: Any, *contents: bytes) -> None:
    for content in contents:
        stream.write(_LENGTH.pack(len(content)))
        stream.write(content)
    stream.flush()


def _read(stream: Any) -> bytes:
    content: bytes = stream.read(*_LENGTH.unpack(stream.read(_LENGTH.size)))
    return content


def _main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    os.nice(10)  # requests have priority
    asked: Any = sys.stdin.buffer
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # parsers may print
    tokenizer = DocumentTokenizer(_read(asked).decode())
    while asked.peek(1):
        about, file = json.loads(_read(asked)), _read(asked)
        _limit_cpu_time(_max_seconds(about["name"]))
        found = _answers(tokenizer, file, **about)
        _write(answers, *(json.dumps(answer).encode() for answer in found))
        del file


def _answers(tokenizer: DocumentTokenizer, file: bytes, name: str, max_tokens: int) -> Iterator[Any]:
    def count(document: Document) -> int:
        return len(tokenizer.encode(document.render()))

    end: dict[str, Any] = {}
    try:
        yield from split(read(file, name), max_tokens, count)
    except UnreadableFileError as error:
        end["error"] = str(error)
    except MemoryError:
        end["error"] = f"reading this file {_TOO_MUCH_MEMORY}"
    except BaseException as error:  # a broken file may cause any error in a parser, also panics
        end["error"] = f"this file can't be read: {type(error).__name__}: {error}"
    yield {**end, "is_last": _memory_bytes() > _MAX_KEPT_BYTES}


def _memory_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _max_seconds(name: str) -> int:
    return MAX_SECONDS * (_OCR if suffix_of(name) == ".pdf" and has_ocr() else 1)


def _limit_cpu_time(seconds: int) -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    most = math.ceil(used.ru_utime + used.ru_stime) + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (most, resource.RLIM_INFINITY))


if __name__ == "__main__":
    _main()
