# SPDX-License-Identifier: Apache-2.0
"""The command line of `tessera eval`."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from app.models.default_model import DEFAULT_DTYPE
from app.modes import MEASURING, MODES, in_order, is_mode
from measuring.kit.arguments import Parser, positive
from measuring.quality.metrics import REFUSAL, normalize
from measuring.quality.questions.plain_english import CHUNKS, MOST_LONG_CHUNKS

PLAIN_QUESTIONS, DEMO_QUESTIONS = 100, 250
"""Default questions for each number of chunks, in plain English and with ``--demo``."""

Command = Literal["eval", "calibrate"]
TOLERANCE = 2.0
_MODES = f"{', '.join(MODES)}, window, also with %P, ~P% and, behind offset, +P%"

_DESCRIPTION = """\
Measure how well and how fast questions are answered, with full attention and with chunks reused.

Each question is asked in each mode: full (full attention over the same tokens), offset (chunks reused, one after
another), shared and parallel (chunks overlap, the question behind the longest or at its own index), %P (keep
P percent of the chunks' tokens), ~P% (read P percent of them again before the question), +P% (compute P percent of
them anew). MODEL is served meanwhile, or --server is asked.

Without --questions they are questions in plain English about invented facts, of eight kinds by turns: plain facts, two
passages at once, comparisons, counts, paraphrases, and questions that no passage answers. Each stands behind 2, 4, 8
and 16 passages."""

_EPILOG = """\
A server that tessera eval starts also tells how likely each right answer is, and how far the predictions of its tokens
are from full attention's: finer measures. On a CPU with instructions for bfloat16 it computes in that, on others in
float32, unless -- --dtype says otherwise.

OUTPUT gets run.json (what was asked), results.jsonl (each answer, as it comes), summary.json and accuracy.png.
An interrupted run reports what it has, and is resumed by the same command.

A question file has one JSON object a line:
  {"system": "Answer from the documents.", "chunks": ["One.", {"title": "B", "text": "Two."}],
   "question": "What …?", "answers": ["this", "or this"]}
"answers": [] says that no chunk has the answer, and that the model should say so (--refusal). system, id and kind may
be left out; results are also reported by kind. The files of HotpotQA, 2WikiMultihopQA, MuSiQue and LongBench's
question-answering sets are read as they are.

examples:
  tessera eval qwen2.5-coder-1.5b --limit 400 --modes full,offset,offset~15%
  tessera eval ./model --questions questions.jsonl -- --dtype float32 --chat-template template.jinja
  tessera eval --server http://localhost:8000 --questions musique_ans_v1.0_dev.jsonl --limit 200

Exit status: 0; 1 if the server fails midway; 2 for errors in usage, files or set-up; 130 when interrupted."""


_CALIBRATION = """\
Find out what reusing chunks costs a model in accuracy, and write a profile that tessera serve --profile follows.

Each question is asked in full attention and in each way of reusing chunks, as tessera eval does. For each number of
chunks the profile has the quickest way whose accuracy is at most --tolerance points below full attention's, and full
attention where there is none, or where there are too few questions to tell."""

_CALIBRATION_EPILOG = """\
OUTPUT gets what tessera eval writes, and profile.json. The same command resumes an interrupted run.

examples:
  tessera calibrate Qwen/Qwen3-0.6B --questions questions.jsonl
  tessera serve Qwen/Qwen3-0.6B --profile results/calibrate-questions/profile.json

Exit status: 0; 1 if the server fails midway; 2 for errors in usage, files or set-up; 130 when interrupted."""


def parse(argv: Sequence[str], command: Command = "eval") -> argparse.Namespace:
    """The options, with the started server's flags in ``server_arguments``, those after ``--`` last.

    Raises :class:`UsageError`.
    """
    own, server_arguments = _divided(list(argv))
    parser = _parser() if command == "eval" else _calibration_parser()
    args = parser.parse_args(own)
    args.server_arguments = tuple(server_arguments)
    if problem := _problem(args):
        parser.error(problem)
    args.chunks = args.chunks or CHUNKS
    if args.server is None:
        args.server_arguments = ("--dtype", DEFAULT_DTYPE, *server_arguments)
    if args.output is None:
        args.output = Path("results", f"{command}-{Path(name_of(args)).stem}")
    return args


def name_of(args: argparse.Namespace) -> str:
    """Name of the set of questions."""
    if args.demo:
        return "demo"
    if args.questions is None:
        return "plain-english-long" if args.long_chunks else "plain-english"
    return str(args.questions.name)


def _divided(argv: list[str]) -> tuple[list[str], list[str]]:
    at = argv.index("--") if "--" in argv else len(argv)
    return argv[:at], argv[at + 1 :]


def _problem(args: argparse.Namespace) -> str | None:
    modes = args.modes or MODES
    checks = {
        "give either --questions or --demo": args.questions is not None and args.demo,
        "give either MODEL or --server": args.model is not None and args.server is not None,
        "--long-chunks is for the questions in plain English": args.long_chunks and bool(args.questions or args.demo),
        "a question file has its own numbers of chunks: leave out --chunks": args.chunks and args.questions is not None,
        f"--long-chunks has at most {MOST_LONG_CHUNKS} chunks": args.long_chunks
        and max(args.chunks or CHUNKS) > MOST_LONG_CHUNKS,
        "give MODEL, or --server URL": not (args.model or args.server or args.demo),
        "arguments after -- are for the server that MODEL starts": bool(args.server_arguments and args.server),
        "full attention is what others are compared with: --modes full,…": args.calibrates and "full" not in modes,
    }
    return next((problem for problem, holds in checks.items() if holds), None)


_FLAGS = "[--questions FILE | --demo] [options] [-- any tessera serve flag]"


def _parser() -> Parser:
    parser = Parser("tessera eval", f"tessera eval [MODEL | --server URL] {_FLAGS}", _DESCRIPTION, _EPILOG)
    parser.set_defaults(calibrates=False)
    parser.add_argument("--server", type=_url, metavar="URL", help="a running Tessera server to ask instead")
    _add_options(parser, ",".join(MODES))
    return parser


def _calibration_parser() -> Parser:
    parser = Parser("tessera calibrate", f"tessera calibrate [MODEL] {_FLAGS}", _CALIBRATION, _CALIBRATION_EPILOG)
    parser.set_defaults(calibrates=True, server=None)
    tolerance = "points of accuracy that reuse may cost (default: %(default)s)"
    parser.add_argument("--tolerance", type=_points, default=TOLERANCE, metavar="POINTS", help=tolerance)
    profile = "where the profile goes; in the model's folder the name must end with profile.json (default: in OUTPUT)"
    parser.add_argument("--profile", type=Path, metavar="FILE", help=profile)
    _add_options(parser, f"{','.join(MODES)}; where attention can be measured also {','.join(MEASURING)}")
    return parser


def _add_options(parser: Parser, default: str) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help="folder or name of the model to serve")
    questions = "a question file (default: questions in plain English)"
    parser.add_argument("--questions", type=Path, metavar="FILE", help=questions)
    demo = "the tiny demo model's own questions, and that model unless one is given"
    parser.add_argument("--demo", action="store_true", help=demo)
    long_chunks = "the questions in plain English behind chunks of some 400 tokens, not 60"
    parser.add_argument("--long-chunks", action="store_true", help=long_chunks)
    modes = f"some of {_MODES} (default: {default})".replace("%", "%%")
    parser.add_argument("--modes", type=_modes, help=modes)
    limit = (
        "ask the first N questions only; without a file N for each number of chunks "
        f"(default: {PLAIN_QUESTIONS}, with --demo {DEMO_QUESTIONS})"
    )
    chunks = f"numbers of chunks that questions stand behind (default: {','.join(map(str, CHUNKS))})"
    parser.add_argument("--chunks", type=_numbers, metavar="N,…", help=chunks)
    parser.add_argument("--limit", type=positive, metavar="N", help=limit)
    parser.add_argument(
        "--max-tokens", type=positive, default=64, metavar="N", help="longest answer, in tokens (default: 64)"
    )
    concurrency = "requests at a time; with more than 1, times to first token are those under load (default: 1)"
    parser.add_argument("--concurrency", type=positive, default=1, metavar="N", help=concurrency)
    output = "folder for the results (default: results/<command>-<name of the question file>)"
    parser.add_argument("--output", type=Path, metavar="DIR", help=output)
    parser.add_argument("--overwrite", action="store_true", help="drop results of an earlier run in that folder")
    refusal = f'what the model says if no chunk has the answer (default: "{REFUSAL}")'
    parser.add_argument("--refusal", type=_phrase, default=REFUSAL, metavar="TEXT", help=refusal)
    parser.add_argument("--api-key", metavar="KEY", help="the server's API key, if it wants one")


def _points(text: str) -> float:
    number = float(text)
    if not 0 <= number <= 100:
        raise argparse.ArgumentTypeError("must be from 0 to 100")
    return number


_points.__name__ = "number"


def _url(text: str) -> str:
    if not text.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"{text!r} does not begin with http:// or https://")
    return text


def _phrase(text: str) -> str:
    if not normalize(text):
        raise argparse.ArgumentTypeError("needs a word besides a, an and the")
    return text


def _numbers(text: str) -> tuple[int, ...]:
    numbers = tuple(sorted({int(number) for number in text.split(",")}))
    if numbers[0] < 2:
        raise argparse.ArgumentTypeError("must be at least 2")
    return numbers


_numbers.__name__ = "list of numbers"


def _modes(text: str) -> tuple[str, ...]:
    names = text.split(",")
    if unknown := [name for name in names if not is_mode(name)]:
        raise argparse.ArgumentTypeError(f"unknown mode {unknown[0]!r}; there are {_MODES}")
    return tuple(in_order(names))
