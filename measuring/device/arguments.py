# SPDX-License-Identifier: Apache-2.0
"""The command line of the check scripts."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from measuring.device.checklist import checks_for
from measuring.device.devices import Kind
from measuring.device.exactness import TOLERANCES
from tools.random_model import PRESETS

DTYPES = ("float32", "float16", "bfloat16")

_EPILOG = """\
checks:
{checks}

layout-probe and those below it start Tessera's server with --model on the device and ask it over HTTP. Its log is in
--output. It takes 1 GiB of the device's memory for vLLM's blocks and as much for the pool, or 4 each with a model of
yours. After -- there may be any flag of tessera serve: it counts instead of what is set here.

examples:
  {prog}
  {prog} --only kernels bandwidth --json results.json
  {prog} --only self-check exactness --model ./Qwen3-8B -- --kv-cache-memory-bytes 8G

Exit status: 0 when nothing failed, 1 when a check failed, 2 for errors in usage or when there is no such device, 130
when interrupted."""


@dataclass(frozen=True, slots=True)
class Defaults:
    """What a script is for."""

    kind: Kind
    dtypes: tuple[str, ...]
    model: str
    description: str


def parse(argv: Sequence[str], defaults: Defaults) -> argparse.Namespace:
    """The options, with the server's ``flags``. Ends the process with status 2 if they make no sense."""
    parser = _parser(defaults)
    at = list(argv).index("--") if "--" in argv else len(argv)
    args = parser.parse_args(argv[:at])
    args.flags = tuple(argv[at + 1 :])
    names = [check.name for check in checks_for(defaults.kind)]
    args.only = args.only or names
    if unknown := [name for name in args.only if name not in names]:
        parser.error(f"there is no check {unknown[0]!r}; there are {', '.join(names)}")
    if not Path(args.model).is_dir() and args.model not in PRESETS:
        parser.error(f"--model: neither a folder nor a random model: {args.model}; there are {', '.join(PRESETS)}")
    if args.json is not None and not args.json.parent.is_dir():
        parser.error(f"--json: no folder {args.json.parent}")
    if args.tolerance is None:
        args.tolerance = TOLERANCES[args.dtype]
    return args


def _parser(defaults: Defaults) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=defaults.description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    checks = checks_for(defaults.kind)
    width = max(len(check.name) for check in checks)
    listed = "\n".join(f"  {check.name:{width}}  {check.title}" for check in checks)
    parser.epilog = _EPILOG.format(checks=listed, prog=parser.prog)
    parser.usage = f"{parser.prog} [options] [-- any tessera serve flag]"
    parser.add_argument("--only", nargs="+", metavar="NAME", help="make these checks (default: all; see below)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to FILE, after each check")
    parser.add_argument("--verbose", action="store_true", help="show the traceback of what failed, and all warnings")
    _add_kernels(parser, defaults)
    _add_bandwidth(parser)
    _add_engine(parser, defaults)
    return parser


def _add_kernels(parser: argparse.ArgumentParser, defaults: Defaults) -> None:
    group = parser.add_argument_group("kernels")
    dtypes = f"of K and V (default: {' '.join(defaults.dtypes)})"
    group.add_argument("--dtypes", nargs="+", choices=DTYPES, default=defaults.dtypes, metavar="DTYPE", help=dtypes)
    thorough = "every page size with every form, instead of in turn: many times as many cases, each compiled anew"
    group.add_argument("--thorough", action="store_true", help=thorough)


def _add_bandwidth(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("bandwidth", "What is moved, in bfloat16; by default 2 GiB of memory are needed.")
    for flag, default, text in (
        ("--tokens", 4096, "tokens"),
        ("--layers", 32, "layers"),
        ("--kv-heads", 8, "heads of K and V"),
        ("--head-size", 128, "elements of a head"),
        ("--iterations", 50, "measurements of each kind"),
    ):
        group.add_argument(flag, type=_positive, default=default, metavar="N", help=f"{text} (default: {default})")


def _add_engine(parser: argparse.ArgumentParser, defaults: Defaults) -> None:
    group = parser.add_argument_group("engine")
    model = f"folder of a model, or a random one of tools.random_model (default: {defaults.model})"
    group.add_argument("--model", default=defaults.model, metavar="MODEL", help=model)
    group.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of the model (default: bfloat16)")
    tolerances = ", ".join(f"{value:g} in {name}" for name, value in TOLERANCES.items())
    tolerance = f"difference of log probabilities that exactness allows (default: {tolerances})"
    group.add_argument("--tolerance", type=float, metavar="X", help=tolerance)
    output = "folder for the server's log (default: build/device-checks)"
    group.add_argument("--output", type=Path, default=Path("build", "device-checks"), metavar="DIR", help=output)


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return number
