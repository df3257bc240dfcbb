# SPDX-License-Identifier: Apache-2.0
"""`tessera ingest`: puts the files of a folder into a server's collection."""

import argparse
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import httpx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from app.documents.files import SUFFIXES
from tools.http_client import http_client
from tools.progress import say

_COUNTED: Final = ("hit", "loaded", "filled", "waited", "failed", "displaced")


def main(argv: Sequence[str]) -> int:
    """Runs the command. Returns the exit code: 1 if a file failed, 2 if the server can't be asked."""
    args = _parser().parse_args(argv)
    files = list(_files(args.folder))
    if not files:
        say(f"{args.folder}: no files of the types {', '.join(SUFFIXES)}")
        return 2
    try:
        return _ingest(args, files)
    except (httpx.HTTPError, _RefusedError) as error:
        say(f"{args.server}: {error or type(error).__name__}")
        return 2
    except KeyboardInterrupt:
        say("interrupted; files that were stored stay, and the same command goes on")
        return 130


class _RefusedError(Exception):
    """The server's reason."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tessera ingest", description=__doc__.partition(": ")[2])
    parser.add_argument("folder", type=Path, help=f"a folder, or one file; types: {', '.join(SUFFIXES)}")
    parser.add_argument("--collection", required=True, help="name of the collection; made if it is new")
    parser.add_argument("--server", default="http://127.0.0.1:8000", help="the server's or router's URL")
    parser.add_argument("--system", help="system prompt of the collection's questions")
    parser.add_argument("--max-tokens", type=int, help="most tokens of a passage")
    parser.add_argument("--namespace", help="namespace of the collection; default: the API key's")
    parser.add_argument(
        "--api-key", default=os.environ.get("TESSERA_API_KEY"), help="a key with the role ingest; or TESSERA_API_KEY"
    )
    return parser


def _files(folder: Path) -> Iterator[Path]:
    """Files that can be read, by name; those in hidden folders are left out."""
    if folder.is_file():
        yield folder
        return
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        if path.suffix.lower() in SUFFIXES and path.is_file() and not any(part.startswith(".") for part in parts):
            yield path


def _ingest(args: argparse.Namespace, files: Sequence[Path]) -> int:
    headers = {"authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    statuses: Counter[str] = Counter()
    passages: Counter[str] = Counter()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with (
        http_client(args.server, headers=headers, timeout=None) as client,
        Progress(*columns, console=console, transient=True) as bar,
    ):
        task = bar.add_task("", total=len(files))
        for path in files:
            name = str(path.relative_to(args.folder)) if args.folder.is_dir() else path.name
            bar.update(task, description=name)
            for line in _lines(client, args, name, path):
                if "summary" in line:
                    passages.update({key: line["summary"][key] for key in _COUNTED})
                elif "index" not in line:
                    statuses[line["status"]] += 1
                    if line["status"] == "failed":
                        bar.console.print(f"{name}: {line['error']}", highlight=False, markup=False)
            bar.advance(task)
    reused = passages["hit"] + passages["loaded"] + passages["waited"]
    counted = ", ".join(f"{number} {status}" for status, number in sorted(statuses.items()))
    say(f"{args.collection}: files: {counted}; passages: {passages['filled']} computed, {reused} already there")
    if passages["failed"]:
        say(f"{passages['failed']} passages could not be computed ahead; questions that need them compute them")
    if passages["displaced"]:
        say(
            f"the pool was too small: {passages['displaced']} chunks left it meanwhile. Questions load them from a "
            "tier, if the server has one, or compute them again (--chunk-cache-memory, --chunk-cache-tiers)"
        )
    return int(statuses["failed"] > 0)


def _lines(client: httpx.Client, args: argparse.Namespace, name: str, path: Path) -> Iterator[dict[str, Any]]:
    """The server's lines about a file; a refused file is a failed one."""
    given = {"system": args.system, "max_tokens": args.max_tokens}
    fields = {key: str(value) for key, value in given.items() if value is not None}
    parameters = {"namespace": args.namespace} if args.namespace else {}
    with (
        path.open("rb") as content,
        client.stream(
            "POST",
            f"/v1/rag/collections/{args.collection}",
            params=parameters,
            data=fields,
            files={"files": (name, content)},
        ) as answer,
    ):
        if answer.status_code == httpx.codes.OK:
            yield from map(json.loads, answer.iter_lines())
            return
        message = _message(answer)
        if answer.status_code in (httpx.codes.BAD_REQUEST, httpx.codes.REQUEST_ENTITY_TOO_LARGE):
            yield {"file": name, "status": "failed", "error": message}
        else:
            raise _RefusedError(message)


def _message(answer: httpx.Response) -> str:
    try:
        return str(json.loads(answer.read())["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"status {answer.status_code}"
