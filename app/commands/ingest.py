# SPDX-License-Identifier: Apache-2.0
"""`tessera ingest`: puts the files of a folder into a server's collection."""

import argparse
import json
import os
import re
import stat
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

import httpx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from app.documents.readers import READERS, suffix_of
from app.documents.retrieve_field import COLLECTION_NAME
from app.documents.splitting import LEAST_TOKENS
from machine.http_client import http_client
from machine.progress import printable, say

_COUNTED: Final = ("hit", "loaded", "filled", "waited", "failed", "displaced")
_ABOUT_ONE_FILE: Final = (
    HTTPStatus.BAD_REQUEST,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
    HTTPStatus.UNPROCESSABLE_ENTITY,
    HTTPStatus.INTERNAL_SERVER_ERROR,
)
"""Other refusals concern all files."""
_UNREACHABLE: Final = (httpx.ConnectError, httpx.UnsupportedProtocol)


def main(argv: Sequence[str]) -> int:
    """Runs the command. Returns the exit code: 1 if a file failed, 2 if the server can't be asked."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.collection is None and not args.dry_run:
        parser.error("give a --collection, or --dry-run")
    try:
        return _Ingestion(args).run()
    except (*_UNREACHABLE, _RefusedError) as error:
        say(f"{args.server}: {printable(str(error)) or type(error).__name__}")
        return 2
    except KeyboardInterrupt:
        say("interrupted; files that were stored stay, and the same command goes on")
        return 130


class _RefusedError(Exception):
    """The server's reason."""


class _FileError(Exception):
    """Why a file can't be ingested."""


class _Found(NamedTuple):
    """A file of the folder. ``left_out`` says why it isn't sent."""

    name: str
    path: Path
    left_out: str | None = None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tessera ingest", description=__doc__.partition(": ")[2])
    parser.add_argument("folder", type=Path, help=f"a folder, or one file; types: {', '.join(READERS)}")
    parser.add_argument("--collection", type=_collection, help="name of the collection; made if it is new")
    parser.add_argument(
        "--dry-run", action="store_true", help="print the passages that the server would make, and store nothing"
    )
    parser.add_argument("--server", default="http://127.0.0.1:8000", help="the server's or router's URL")
    parser.add_argument("--system", help="system prompt of the collection's questions")
    parser.add_argument("--max-tokens", type=_max_tokens, help="most tokens of a passage")
    parser.add_argument(
        "--context-tokens",
        type=int,
        help="compute each passage behind so much of the text before it in its file, at most 512 (default: 0)",
    )
    parser.add_argument("--namespace", help="namespace of the collection; default: the API key's")
    parser.add_argument(
        "--api-key", default=os.environ.get("TESSERA_API_KEY"), help="a key with the role ingest; or TESSERA_API_KEY"
    )
    return parser


def _collection(name: str) -> str:
    if not re.fullmatch(COLLECTION_NAME, name):
        raise argparse.ArgumentTypeError("a name has 1 to 64 letters, digits, '.', '_' or '-', and no sign first")
    return name


def _max_tokens(number: str) -> int:
    if int(number) < LEAST_TOKENS:
        raise argparse.ArgumentTypeError(f"at least {LEAST_TOKENS}")
    return int(number)


def _files(folder: Path) -> Iterator[_Found]:
    """The files of a folder by name, without hidden ones. Links are not followed."""
    if not folder.is_dir():
        yield _Found(folder.name, folder.resolve())
        return
    coming = [folder]  # no recursion: folders may be nested deeper than Python's calls
    while coming:
        path = coming.pop()
        try:
            entries = sorted(path.iterdir())
        except OSError as error:
            yield _Found(str(path.relative_to(folder)), path, error.strerror)
            continue
        below = []
        for entry in (each for each in entries if not each.name.startswith(".")):
            name = str(entry.relative_to(folder))
            try:
                mode = entry.lstat().st_mode
            except OSError as error:
                yield _Found(name, entry, error.strerror)
                continue
            if stat.S_ISLNK(mode):
                yield _Found(name, entry, "a symbolic link")
            elif stat.S_ISDIR(mode):
                below.append(entry)
            else:
                yield _Found(name, entry, None if suffix_of(entry.name) in READERS else "its type can't be read")
        coming += reversed(below)


class _Ingestion:
    """One run of the command: files, one after the other, and what became of them."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._statuses: Counter[str] = Counter()
        self._passages: Counter[str] = Counter()
        self._failed: list[str] = []
        self._left_out: list[str] = []

    def run(self) -> int:
        """Sends the files, then says what became of them. Returns the exit code."""
        args = self._args
        headers = {"authorization": f"Bearer {args.api_key}"} if args.api_key else {}
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        with (
            http_client(args.server, headers=headers, timeout=None) as client,
            Progress(*columns, console=Console(stderr=True), transient=True) as bar,
        ):
            files = list(_files(args.folder))
            all_files, passages = bar.add_task("files", total=len(files)), bar.add_task("passages")
            for found in files:
                bar.reset(passages, description=printable(found.name), total=None)
                for line in self._lines(client, found):
                    if (progress := line.get("progress")) is not None:
                        bar.update(passages, completed=progress["done"], total=progress["total"])
                bar.advance(all_files)
        self._report()
        return int(self._statuses["failed"] > 0)

    def _lines(self, client: httpx.Client, found: _Found) -> Iterator[dict[str, Any]]:
        """The server's lines about a file; whatever goes wrong with a file, it fails alone."""
        try:
            if found.left_out:
                self._left_out.append(f"left out: {found.name}: {found.left_out}")
                return
            _check_name(found.name)
            with _opened(found.path) as content:
                if self._args.dry_run:
                    self._print(client, found.name, content)
                    return
                for line in self._sent(client, found.name, content):
                    self._count(line)
                    yield line
        except _UNREACHABLE:
            raise
        except (OSError, httpx.HTTPError, _FileError) as error:
            reason = (error.strerror if isinstance(error, OSError) else str(error)) or type(error).__name__
            reason = reason.removeprefix(f"{found.name}: ")  # an answer about several files says which
            self._count({"file": found.name, "status": "failed", "error": reason})

    def _count(self, line: dict[str, Any]) -> None:
        if "summary" in line:
            self._passages.update({key: line["summary"][key] for key in _COUNTED})
            if (problem := line["summary"].get("search")) is not None and problem not in self._failed:
                self._failed.append(problem)
        elif "index" not in line:
            self._statuses[line["status"]] += 1
            if line["status"] == "failed":
                self._failed.append(f"failed: {line['file']}: {line['error']}")

    def _sent(self, client: httpx.Client, name: str, content: BinaryIO) -> Iterator[dict[str, Any]]:
        given = {name: getattr(self._args, name) for name in ("system", "max_tokens", "context_tokens")}
        fields = {key: str(value) for key, value in given.items() if value is not None}
        parameters = {"namespace": self._args.namespace} if self._args.namespace else {}
        path = f"/v1/rag/collections/{self._args.collection}"
        with client.stream("POST", path, params=parameters, data=fields, files={"files": (name, content)}) as answer:
            _check(answer)
            is_whole = False
            for line in map(json.loads, answer.iter_lines()):
                is_whole = is_whole or "summary" in line
                yield line
        if not is_whole:
            raise _FileError("the server ended its answer early; what it stored stays")

    def _print(self, client: httpx.Client, name: str, content: BinaryIO) -> None:
        """Prints the passages that the server makes of a file."""
        parameters = {"filename": name, "max_tokens": self._args.max_tokens or 256}
        answer = client.post("/v1/rag/split", params=parameters, content=content)
        _check(answer)
        for number, chunk in enumerate(answer.json()["chunks"], 1):
            page = f", page {chunk['metadata']['page']}" if chunk["metadata"]["page"] else ""
            title = f", {printable(chunk['title'])}" if chunk["title"] else ""
            print(f"{printable(name)} #{number}: {chunk['tokens']} tokens{page}{title}")
            print("".join(f"    {line}\n" for line in chunk["text"].split("\n")))
        self._statuses["read"] += 1

    def _report(self) -> None:
        passages, name = self._passages, self._args.collection or "dry run"
        counted = ", ".join(f"{number} {status}" for status, number in sorted(self._statuses.items())) or "none"
        reused = passages["hit"] + passages["loaded"] + passages["waited"]
        computed = "" if self._args.dry_run else f"; passages: {passages['filled']} computed, {reused} already there"
        say(f"{name}: files: {counted}{computed}")
        if passages["failed"]:
            say(f"{passages['failed']} passages could not be computed ahead; questions that need them compute them")
        if passages["displaced"]:
            say(
                f"the pool was too small: {passages['displaced']} chunks left it meanwhile. Questions load them from a "
                "tier, if the server has one, or compute them again (--chunk-cache-memory, --chunk-cache-tiers)"
            )
        for line in (*self._left_out, *self._failed):
            say(printable(line))


def _check_name(name: str) -> None:
    """Raises :class:`_FileError` for names that no request can carry."""
    categories = {unicodedata.category(character) for character in name}
    if "Cs" in categories:
        raise _FileError("its name is not UTF-8")
    if "Cc" in categories:
        raise _FileError("its name has control characters")


def _opened(path: Path) -> BinaryIO:
    """A regular file. A link that has replaced it meanwhile is not followed, and a pipe not waited for."""
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise _FileError("not a regular file")
    return file


def _check(answer: httpx.Response) -> None:
    """Raises :class:`_FileError` or :class:`_RefusedError` with the server's reason, unless it answers."""
    if answer.status_code == HTTPStatus.OK:
        return
    try:
        message = str(json.loads(answer.read())["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = f"status {answer.status_code}"
    raise _FileError(message) if answer.status_code in _ABOUT_ONE_FILE else _RefusedError(message)
