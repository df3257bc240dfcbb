# SPDX-License-Identifier: Apache-2.0
"""The command line of `tessera bench`."""

import argparse
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import NoReturn

from measuring.speed.workloads import WORKLOADS

LEFT_TO_LONG_RUNS = ("placement",)
"""The short form is to end within ten minutes."""
DEFAULT_FLAGS = ("--dtype", "float32", "--max-model-len", "20480", "--kv-cache-memory-bytes", "2G")

_DESCRIPTION = """\
Measure Tessera beside stock vLLM: both are started on the same model with the same flags, and get the same requests in
turn. Nothing is reported when an answer isn't what it must be. Without --long there are few rounds of each: whether
claims near their bounds hold is then up to chance, as the intervals say."""

_EPILOG = f"""\
workloads (default: all, but without --long not {", ".join(LEFT_TO_LONG_RUNS)}):
{{workloads}}

Any other flag is one of vllm serve, for both servers; unless given:
  {" ".join(DEFAULT_FLAGS)}

OUTPUT gets run.json (what is measured, and whether it was complete), samples.jsonl (each sample, as it comes),
summary.json, a plot for each workload, report.html, and the servers' logs.

examples:
  tessera bench
  tessera bench context chat --long --output build/long
  tessera bench load --trace requests.jsonl
  tessera bench context --model ./model --dtype bfloat16 --max-num-batched-tokens 4096

Exit status: 0 when all was measured, whether or not every claim holds; 1 if a server failed or an answer was wrong;
2 for errors in usage or files; 130 when interrupted. What was measured by then is kept, marked as partial."""


class UsageError(ValueError):
    """The command line can't be obeyed; the message says why."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (tessera bench --help shows the options)")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options, with the names of ``workloads`` and the servers' ``flags``. Raises :class:`UsageError`."""
    parser = _parser()
    names = list(takewhile(lambda word: not word.startswith("-"), argv))
    args, flags = parser.parse_known_args(argv[len(names) :])
    if unknown := [name for name in names if name not in WORKLOADS]:
        parser.error(f"unknown workload {unknown[0]!r}; there are {', '.join(WORKLOADS)}")
    if flags and not flags[0].startswith("-"):
        parser.error(f"unexpected {flags[0]!r}: workloads come before options")
    if args.model is not None and not args.model.is_dir():
        parser.error(f"--model: no folder {args.model}")
    args.workloads = list(dict.fromkeys(names)) or [
        name for name in WORKLOADS if args.long or name not in LEFT_TO_LONG_RUNS
    ]
    args.flags = (*DEFAULT_FLAGS, *flags)
    return args


def _parser() -> argparse.ArgumentParser:
    width = max(map(len, WORKLOADS))
    workloads = "\n".join(f"  {name:{width}}  {workload.title}" for name, workload in WORKLOADS.items())
    parser = _Parser(
        prog="tessera bench",
        usage="tessera bench [WORKLOAD ...] [options] [any vllm serve flag]",
        description=_DESCRIPTION,
        epilog=_EPILOG.format(workloads=workloads),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    model = "folder of the model (default: a random one of about 100 M parameters)"
    parser.add_argument("--model", type=Path, metavar="FOLDER", help=model)
    parser.add_argument("--long", action="store_true", help="the full sizes, which take hours on two cores")
    output = "folder for the results (default: build/bench)"
    parser.add_argument("--output", type=Path, default=Path("build", "bench"), metavar="DIR", help=output)
    parser.add_argument("--overwrite", action="store_true", help="drop the results of an earlier run in that folder")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of all texts and requests (default: 0)")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="requests of load, instead of generated ones")
    return parser
