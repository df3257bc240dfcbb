# SPDX-License-Identifier: Apache-2.0
"""Measures how much of what isolated chunks lose comes back with `context`, the text before each in its file.

    apt-get install endless-sky-data
    python research/measure_neighbours.py [--model MODEL] [--limit N] [--chunk-tokens N] [-- FLAG ...]

The text is that of the planets in the game Endless Sky (Debian's package endless-sky-data 0.9.8-1.2) as plain text: a
planet's name, then paragraphs that mostly say "this world", "here" and "the spaceport". Each question of
`endless_sky_references.json` names a planet; the passage with the answer doesn't name it, but the one before does. The
question is asked behind a page of consecutive passages, among them a rival: one that answers it for another planet.

Prints each question's answers as JSON; accuracy in full attention, over isolated chunks and over chunks with their
context; paired differences with their 95 % intervals; the share of isolation's loss that comes back; and times to the
first token over cached chunks.
"""

import argparse
import json
import re
import statistics
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, NamedTuple

import httpx
import numpy as np
import numpy.typing as npt

from app.documents.document import Document
from app.documents.readers import Text, read
from app.documents.splitting import LEAST_TOKENS, Piece, split
from app.models.default_model import DEFAULT_DTYPE
from app.models.packaged_models import local_model
from machine.http_client import http_client
from machine.server_process import ServerProcess
from measuring.kit.arguments import positive
from measuring.kit.statistics import interval
from measuring.quality.metrics import contains, score

PACKAGE: Final = "endless-sky-data"
FOLDER: Final = Path("/usr/share/games/endless-sky/data")
"""Where the package has its texts."""
QUESTIONS: Final = Path(__file__).with_name("endless_sky_references.json")
CHUNK_TOKENS: Final = 96
"""The most of a passage, for which the questions were written."""
PAGE: Final = 8
"""Passages that a question is asked behind."""
FULL: Final = "full attention"
ISOLATED: Final = "isolated"
CONTEXT: Final = "with context"
SYSTEM: Final = "Answer the question from the passages, in a few words."
_CONTEXT_CHARACTERS: Final = 4096
"""Of the text before a chunk: more than the 512 tokens that count."""
_ANSWER_TOKENS: Final = 40
_THREADS: Final = 8
# The strategy also keeps a profile beside the model from deciding how chunks are reused.
_FLAGS: Final = ("--dtype", DEFAULT_DTYPE, "--max-model-len", "4096", "--chunk-mode", "offset")
_PROSE: Final = re.compile(r'^planet "?([^"\n]+)"?$|^\t(?:description|spaceport) `\s*(.*?)\s*`\s*$', re.MULTILINE)
_TOKEN: Final = re.compile(r"\w+|[^\w\s]")


class Reference(NamedTuple):
    """A question. ``phrase`` locates the passage with its answer, ``rival`` the one with another subject's answer.

    ``subject`` is the name as it stands in the passage before.
    """

    file: str
    subject: str
    phrase: str
    question: str
    answers: Sequence[str]
    rival: str


class Asked(NamedTuple):
    """A question and the passages that it is asked behind, in the order of the text."""

    reference: Reference
    page: Sequence[Piece]


class UnfitError(ValueError):
    """A question doesn't fit the passages; the message says why."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen2.5-coder-1.5b", help="default: qwen2.5-coder-1.5b")
    parser.add_argument("--limit", type=positive, help="ask only so many questions, from all over the text")
    tokens = f"the most of a passage, in words and punctuation marks (default: {CHUNK_TOKENS})"
    parser.add_argument("--chunk-tokens", type=positive, default=CHUNK_TOKENS, help=tokens)
    parser.add_argument("flags", nargs="*", metavar="FLAG", help="of the server")
    args = parser.parse_args()
    if args.chunk_tokens < LEAST_TOKENS:
        parser.error(f"--chunk-tokens must be at least {LEAST_TOKENS}")
    references = read_references()
    texts = {file: planets(FOLDER / file) for file in sorted({each.file for each in references})}
    asked, unfit = fitting(references, {file: passages(text, args.chunk_tokens) for file, text in texts.items()})
    for question, why in unfit.items():
        print(f"left out, {why}: {question}", flush=True)
    limit = min(args.limit or len(asked), len(asked))
    if limit == 0:
        raise SystemExit("no question fits these passages")
    asked = [asked[number * len(asked) // limit] for number in range(limit)]
    model = local_model(args.model)
    with tempfile.TemporaryDirectory() as folder:
        server = ServerProcess(Path(folder) / "server.log", model, *_FLAGS, *args.flags)
        try:
            server.wait_ready()
            with http_client(server.url, timeout=600) as client:
                print_accuracy(measure_accuracy(client, asked, texts))
                print_times(measure_times(client, asked, texts))
        finally:
            server.stop()


def read_references() -> list[Reference]:
    """All questions, in the order of the text."""
    return [Reference(**each) for each in json.loads(QUESTIONS.read_text(encoding="utf-8"))]


def planets(file: Path) -> str:
    """The names and descriptions of a file's planets, each a paragraph; ends the program if the file isn't there."""
    try:
        data = file.read_text(encoding="utf-8")
    except OSError as error:
        raise SystemExit(f"{file}: {error.strerror}: apt-get install {PACKAGE}") from error
    return read("\n\n".join(name or prose for name, prose in _PROSE.findall(data)).encode(), "planets.txt").text


def passages(text: str, max_tokens: int = CHUNK_TOKENS) -> list[Piece]:
    """The passages of a text, the same ones for all models: tokens are words and punctuation marks."""

    def count(document: Document) -> int:
        return len(_TOKEN.findall(document.render()))

    return list(split(Text(text), max_tokens, count))


def fitting(
    references: Iterable[Reference], files: Mapping[str, Sequence[Piece]]
) -> tuple[list[Asked], dict[str, str]]:
    """The questions that fit the files' passages, with their pages, and why others don't."""
    asked, unfit = list[Asked](), dict[str, str]()
    for number, reference in enumerate(references):
        try:
            asked.append(Asked(reference, page(reference, files[reference.file], number)))
        except UnfitError as error:
            unfit[reference.question] = str(error)
    return asked, unfit


def page(reference: Reference, pieces: Sequence[Piece], number: int) -> Sequence[Piece]:
    """The passages of a page with the passage, the one before it and the rival; ``number`` varies their places.

    Raises :class:`UnfitError`.
    """
    passage, rival = _number_of(reference.phrase, pieces), _number_of(reference.rival, pieces)
    if passage == 0 or not _names(pieces[passage - 1].text, reference.subject):
        raise UnfitError("the passage before doesn't name the subject")
    if _names(pieces[passage].text, reference.subject):
        raise UnfitError("the passage names the subject itself")
    if not contains(pieces[passage].text, reference.answers):
        raise UnfitError("the passage has no answer")
    if contains(pieces[rival].text, reference.answers):
        raise UnfitError("the rival has the same answer")
    starts = range(max(max(passage, rival) - PAGE + 1, 0), min(passage - 1, rival, len(pieces) - PAGE) + 1)
    if passage == rival or not starts:
        raise UnfitError("no page has passage and rival")
    start = starts[number % len(starts)]
    found = pieces[start : start + PAGE]
    others = (piece.text for piece in found if piece != pieces[passage])
    if any(_names(text, reference.subject) and contains(text, reference.answers) for text in others):
        raise UnfitError("another passage names the subject and has the answer")
    return found


def _number_of(phrase: str, pieces: Sequence[Piece]) -> int:
    found = [number for number, piece in enumerate(pieces) if phrase in piece.text]
    if len(found) != 1:
        raise UnfitError(f"{len(found)} passages have {phrase!r}")
    return found[0]


def _names(text: str, subject: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(subject)}(?!\w)", text) is not None


def measure_accuracy(client: httpx.Client, asked: Sequence[Asked], texts: Mapping[str, str]) -> dict[str, list[float]]:
    """Accuracy of each question's answer in each way; prints the answers."""
    ways = (FULL, ISOLATED, CONTEXT)

    def answer(each: Asked, way: str) -> str:
        reference, page = each
        answered = _ask(client, way, page, texts[reference.file], reference.question, _ANSWER_TOKENS)
        return str(answered["choices"][0]["message"]["content"])

    accuracies: dict[str, list[float]] = {way: [] for way in ways}
    with ThreadPoolExecutor(_THREADS) as pool:
        pending = [{way: pool.submit(answer, each, way) for way in ways} for each in asked]
        for (reference, _), futures in zip(asked, pending, strict=True):
            answers = {way: future.result() for way, future in futures.items()}
            for way, text in answers.items():
                accuracies[way].append(score(text, reference.answers).accuracy)
            print(json.dumps({"question": reference.question, "right": reference.answers, **answers}), flush=True)
    return accuracies


def measure_times(client: httpx.Client, asked: Sequence[Asked], texts: Mapping[str, str]) -> dict[str, list[float]]:
    """Milliseconds to the first token over cached chunks, one request at a time, with another question than before."""
    times: dict[str, list[float]] = {ISOLATED: [], CONTEXT: []}
    for number, (reference, page) in enumerate(asked):
        another = asked[number - 1].reference.question
        for way in list(times)[:: 1 if number % 2 else -1]:
            _ask(client, way, page, texts[reference.file], reference.question, 1)
            report = _ask(client, way, page, texts[reference.file], another, 1)["cache"]
            assert {chunk["status"] for chunk in report["chunks"]} == {"hit"}, report
            times[way].append(report["timings_ms"]["first_token"])
    return times


def _ask(
    client: httpx.Client, way: str, page: Sequence[Piece], text: str, question: str, max_tokens: int
) -> dict[str, Any]:
    """The response to a question behind a page, all of whose passages are chunks."""
    chunks = [{"text": piece.text} for piece in page]
    if way == CONTEXT:
        for chunk, piece in zip(chunks, page, strict=True):
            chunk["context"] = text[max(piece.start - _CONTEXT_CHARACTERS, 0) : piece.start]
    cache = {"mode": "full" if way == FULL else "chunked"}
    body = {"system": SYSTEM, "chunks": chunks, "question": question, "max_tokens": max_tokens, "temperature": 0}
    response = client.post("/v1/rag/chat", json={**body, "cache": cache})
    if response.is_error:
        raise SystemExit(response.text)
    answered: dict[str, Any] = response.json()
    report = answered["cache"]
    assert report["mode"] == cache["mode"], report
    assert not {"decision", "recompute", "reread"} & report.keys(), report  # nothing but the way decides
    return answered


def print_accuracy(accuracies: Mapping[str, Sequence[float]]) -> None:
    """Prints the accuracy of each way, their differences, and the share of isolation's loss that comes back."""
    for way, each in accuracies.items():
        print(f"{way}: {100 * statistics.fmean(each):.1f} % of {len(each)} right")
    full, isolated, context = (np.asarray(accuracies[way]) for way in (FULL, ISOLATED, CONTEXT))
    for what, values in (
        (f"{ISOLATED} minus {FULL}", isolated - full),
        (f"{CONTEXT} minus {FULL}", context - full),
        (f"{CONTEXT} minus {ISOLATED}", context - isolated),
    ):
        low, high = interval(list(100 * values), 0.95)
        print(f"{what}: {100 * values.mean():+.1f} points ({low:+.1f} to {high:+.1f})")
    if full.mean() <= isolated.mean():
        print("isolation loses nothing that could come back")
        return
    share, low, high = regained(full - isolated, context - isolated)
    print(f"of isolation's loss comes back: {100 * share:.0f} % ({100 * low:.0f} to {100 * high:.0f})", flush=True)


def regained(lost: npt.NDArray[np.float64], won: npt.NDArray[np.float64]) -> tuple[float, float, float]:
    """The share of a loss that was won back, and its 95 % interval, from both for each question.

    A resample that loses less than one question counts as if it lost one.
    """

    def share(rows: npt.NDArray[np.float64], axis: int) -> npt.NDArray[np.float64]:
        numbers = rows.astype(int)
        least = 1 / lost.size
        shares: npt.NDArray[np.float64] = won[numbers].mean(axis) / np.maximum(lost[numbers].mean(axis), least)
        return shares

    return float(won.mean() / lost.mean()), *interval(range(lost.size), 0.95, share)


def print_times(times: Mapping[str, Sequence[float]]) -> None:
    """Prints the median times to the first token and their median ratio."""
    for way, each in times.items():
        print(f"{way}, cached: {statistics.median(each):.0f} ms to the first token")
    ratios = [context / isolated for context, isolated in zip(times[CONTEXT], times[ISOLATED], strict=True)]
    low, high = interval(ratios, 0.95, np.median)
    print(f"{CONTEXT} over {ISOLATED}: {statistics.median(ratios):.3f} ({low:.3f} to {high:.3f})")


if __name__ == "__main__":
    main()
