# SPDX-License-Identifier: Apache-2.0
"""Work of requests in processes with limits, one piece at a time in each; a piece at fault fails alone.

Between both, what prepares a process, then each question, as JSON and bytes, and each answer stand behind their length.
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
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from engine_ext.chunks.turns import FairTurns
from engine_ext.client.request import owner

_MAX_KEPT_BYTES: Final = 512 << 20
"""Memory of a process that gets another question."""
_SLOWDOWN: Final = 10
"""Times the limit of CPU time that a piece of work may take, on a busy machine."""
_ROOT: Final = Path(__file__).parents[2]
_LENGTH: Final = struct.Struct("<Q")

Answers = Callable[[dict[str, Any], bytes], Iterable[Any]]
"""Answers to a question, as values that JSON has."""


class WorkFailedError(Exception):
    """A piece of work has ended its process; ``is_late``: by taking longer than it may."""

    def __init__(self, *, is_late: bool) -> None:
        super().__init__("took too long" if is_late else "broke its process")
        self.is_late = is_late


class StoppedError(Exception):
    """The server stops before a piece of work is done: no fault of the work's."""

    def __init__(self) -> None:
        super().__init__("the server is stopping")


class LimitedProcesses:
    """Processes that run ``module``, which calls :func:`answer_all`; started when needed, then used again and again.

    ``prepared`` is given to each process once. No tenant has all of the ``number`` of processes.
    """

    def __init__(self, module: str, prepared: Callable[[], bytes], number: int) -> None:
        self._module = module
        self._prepared = prepared
        self._threads = ThreadPoolExecutor(number, module.rpartition(".")[2])
        self._turns = FairTurns(number, most_of_one=max(1, number - 1))
        self._running = set[subprocess.Popen[bytes]]()
        self._idle: list[subprocess.Popen[bytes]] = []
        self._is_closed = False

    async def ask(self, about: dict[str, Any], content: bytes, max_seconds: int) -> list[Any]:
        """The answers to a question that takes at most ``max_seconds`` of CPU time.

        Raises :class:`WorkFailedError`, and :class:`StoppedError` after :meth:`close`.
        """

        async def asked() -> list[Any]:
            if self._is_closed:
                raise StoppedError
            running = asyncio.get_running_loop().run_in_executor(self._threads, self._ask, about, content, max_seconds)
            return await running

        return await self._turns.run(owner(), asked)

    def close(self) -> None:
        """Ends the processes; what they work on, or what waits for its turn, is done no more."""
        self._is_closed = True
        for process in tuple(self._running):
            process.kill()
        self._threads.shutdown(cancel_futures=True)
        for process in tuple(self._running):
            self._end(process)

    def _ask(self, about: dict[str, Any], content: bytes, max_seconds: int) -> list[Any]:
        process = self._free()
        watch = threading.Timer(max_seconds * _SLOWDOWN, process.kill)
        watch.start()
        try:
            _write(process.stdin, json.dumps([max_seconds, about]).encode(), content)
            *answers, is_last = _answers_of(process)
        except (OSError, ValueError, struct.error) as error:  # the process has ended
            if self._is_closed:
                raise StoppedError from error
            is_late = not watch.is_alive() or process.wait() == -signal.SIGXCPU
            self._end(process)
            raise WorkFailedError(is_late=is_late) from error
        finally:
            watch.cancel()
        if is_last or process.poll() is not None:
            self._end(process)
        else:
            self._idle.append(process)
        return answers

    def _free(self) -> subprocess.Popen[bytes]:
        while self._idle:
            if (process := self._idle.pop()).poll() is None:
                return process
            self._end(process)  # the system may have ended it
        return self._started()

    def _started(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", self._module],  # -P: the working folder's modules stay out
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))},
        )
        self._running.add(process)
        try:
            _write(process.stdin, self._prepared())
            _read(process.stdout)
        except (OSError, struct.error) as error:
            self._end(process)
            if self._is_closed:
                raise StoppedError from error
            raise RuntimeError(f"a process of {self._module} has ended before it was asked anything") from error
        return process

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        process.kill()
        process.communicate()
        self._running.discard(process)


def answer_all(prepare: Callable[[bytes], Answers]) -> None:
    """Answers questions from standard input until it ends, with what ``prepare`` makes of what comes first."""
    os.nice(10)  # requests have priority
    asked: Any = sys.stdin.buffer
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # parsers may print
    answer = prepare(_read(asked))
    _write(answers, b"")  # ready: what ends it from now on is a question
    while asked.peek(1):
        (max_seconds, about), content = json.loads(_read(asked)), _read(asked)
        _limit_cpu_time(max_seconds)
        for each in answer(about, content):
            _write(answers, json.dumps([each]).encode())
        del content
        _write(answers, json.dumps(_memory_bytes() > _MAX_KEPT_BYTES).encode())


def _answers_of(process: subprocess.Popen[bytes]) -> Iterator[Any]:
    """A process's answers, and whether it takes no further question."""
    while isinstance(answer := json.loads(_read(process.stdout)), list):
        yield answer[0]
    yield answer


def _write(stream: Any, *contents: bytes) -> None:
    for content in contents:
        stream.write(_LENGTH.pack(len(content)))
        stream.write(content)
    stream.flush()


def _read(stream: Any) -> bytes:
    content: bytes = stream.read(*_LENGTH.unpack(stream.read(_LENGTH.size)))
    return content


def _memory_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _limit_cpu_time(seconds: int) -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    most = math.ceil(used.ru_utime + used.ru_stime) + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (most, resource.RLIM_INFINITY))
