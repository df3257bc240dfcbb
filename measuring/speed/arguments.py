# SPDX-License-Identifier: Apache-2.0
"""The command line of `tessera bench`."""

import argparse
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

from app.models.default_model import DEFAULT_DTYPE
from measuring.kit.arguments import Parser, positive
from measuring.speed.verdicts import CONFIDENCE, LEAST_ROUNDS
from measuring.speed.workloads import WORKLOADS
from measuring.speed.workloads.context import CHUNK_TOKENS

LEFT_TO_LONG_RUNS = ("placement", "decoding")
DEFAULT_FLAGS = ("--dtype", DEFAULT_DTYPE, "--max-model-len", "20480", "--kv-cache-memory-bytes", "2G")
_MINUTES, _LONG_MINUTES = 15, 60

_DESCRIPTION = f"""\
Measure Tessera beside stock vLLM: both are started on the same model with the same flags, and get the same requests in
turn. Nothing is reported when an answer isn't what it must be.

Each workload is measured in rounds, at least {LEAST_ROUNDS}, until the {CONFIDENCE:.0%} interval of each claim lies
within the claim's bounds ("holds") or outside ("does not hold"), or until its time is up ("undecided")."""

_EPILOG = f"""\
workloads (default: all, but without --long not {", ".join(LEFT_TO_LONG_RUNS)}):
{{workloads}}

Any other flag is one of vllm serve, for both servers; unless given:
  {" ".join(DEFAULT_FLAGS)}

OUTPUT gets run.json (what is measured, and whether it was complete), samples.jsonl (each sample, as it comes),
summary.json, and the servers' logs.

examples:
  tessera bench
  tessera bench context chat --long --output build/long
  tessera bench placement --minutes 30
  tessera bench load --trace requests.jsonl
  tessera bench context decoding --model qwen2.5-coder-1.5b --dtype bfloat16 --tokens 1024,4096,8192

Exit status: 0 when all was measured, whether or not every claim holds; 1 if a server failed or an answer was wrong;
2 for errors in usage or files; 130 when interrupted. What was measured by then is kept, marked as partial."""


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options, with the names of ``workloads`` and the servers' ``flags``. Raises :class:`UsageError`."""
    parser = _parser()
    names = list(takewhile(lambda word: not word.startswith("-"), argv))
    args, flags = parser.parse_known_args(argv[len(names) :])
    if unknown := [name for name in names if name not in WORKLOADS]:
        parser.error(f"unknown workload {unknown[0]!r}; there are {', '.join(WORKLOADS)}")
    if flags and not flags[0].startswith("-"):
        parser.error(f"unexpected {flags[0]!r}: workloads come before options")
    args.workloads = list(dict.fromkeys(names)) or [
        name for name in WORKLOADS if args.long or name not in LEFT_TO_LONG_RUNS
    ]
    args.minutes = args.minutes or (_LONG_MINUTES if args.long else _MINUTES)
    args.flags = (*DEFAULT_FLAGS, *flags)
    return args


def _contexts(text: str) -> tuple[int, ...]:
    numbers = tuple(sorted({int(number) for number in text.split(",")}))
    if any(number < 1 or number % CHUNK_TOKENS for number in numbers):
        raise argparse.ArgumentTypeError(f"must be multiples of {CHUNK_TOKENS}")
    return numbers


_contexts.__name__ = "list of numbers"


def _parser() -> Parser:
    width = max(map(len, WORKLOADS))
    workloads = "\n".join(f"  {name:{width}}  {workload.title}" for name, workload in WORKLOADS.items())
    usage = "tessera bench [WORKLOAD ...] [options] [any vllm serve flag]"
    parser = Parser("tessera bench", usage, _DESCRIPTION, _EPILOG.format(workloads=workloads))
    model = "folder of the model, or a name of tessera model (default: a random one of about 100 M parameters)"
    parser.add_argument("--model", metavar="MODEL", help=model)
    parser.add_argument("--long", action="store_true", help="the full sizes, which take hours on two cores")
    tokens = f"contexts that context measures, multiples of {CHUNK_TOKENS} (default: 4096; with --long 1024 to 16384)"
    parser.add_argument("--tokens", type=_contexts, default=(), metavar="N,…", help=tokens)
    minutes = f"time limit of a workload's rounds (default: {_MINUTES}, with --long {_LONG_MINUTES})"
    parser.add_argument("--minutes", type=positive, metavar="N", help=minutes)
    output = "folder for the results (default: build/bench)"
    parser.add_argument("--output", type=Path, default=Path("build", "bench"), metavar="DIR", help=output)
    parser.add_argument("--overwrite", action="store_true", help="drop the results of an earlier run in that folder")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of all texts and requests (default: 0)")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="requests of load, instead of generated ones")
    return parser
