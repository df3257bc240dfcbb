# SPDX-License-Identifier: Apache-2.0
"""A cluster of replicas behind routers, simulated: who should answer which request?

    python -m benchmarks.cluster_simulation [scaling] [corpus] [hot] [failures] [routers] [prices] [speed]

Routers call :func:`replicas.routing.rank`; pools evict by :mod:`cache.eviction`; engines, network and time are models
(docs/scaling.md). *scaling*: every policy with 2 to 256 replicas. *corpus*: up to ten million documents. *hot*: one
topic gets 30 % of the requests. *failures*: a quarter of the replicas end, and come back. *routers*: one or many of
them. *prices*: other values of the constants of replicas/routing.py. *speed*: how long a choice takes, measured.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

from rich.console import Console

import replicas.routing
from benchmarks.cluster import plot
from benchmarks.cluster.parts import PARTS, Row, Scale
from benchmarks.cluster.replica import EngineModel
from benchmarks.cluster.speed import speeds
from benchmarks.cluster.tables import failure_table, speed_table, table_of
from benchmarks.machine import cpu_model
from tools.progress import say

SPEED = "speed"


def run_part(name: str, scale: Scale, console: Console) -> list[dict[str, Any]]:
    """Runs one part and prints its table; returns its rows for JSON."""
    if name == SPEED:
        measured = list(speeds())
        console.print(speed_table(measured))
        return [asdict(speed) for speed in measured]
    rows: list[Row] = []
    for row in PARTS[name](scale):
        rows.append(row)
        it = row.outcome
        say(f"{name}: {it.replicas} replicas, {it.documents} documents, {it.policy}: {it.cpu_s:.1f} s")
    console.print(table_of(name, rows))
    if name == "failures":
        console.print(failure_table(rows))
    return [{**asdict(row.outcome), **_beside(row)} for row in rows]


def _beside(row: Row) -> dict[str, float]:
    return {"routers": row.routers, "load_tokens": row.load_tokens, "home_discount": row.home_discount}


def write(name: str, rows: Sequence[dict[str, Any]], scale: Scale, cpu_s: float, folder: Path) -> None:
    """Writes a part's rows, and what they rest on."""
    about = {"part": name, "scale": asdict(scale), "engine": asdict(EngineModel()), "cpu": cpu_model()}
    text = json.dumps({**about, "cpu_s": cpu_s, "rows": rows}, indent=1)
    (folder / f"{name}.json").write_text(text + "\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a table for each part, and writes its rows as JSON, and of *scaling* a plot."""
    args = _parser().parse_args(argv)
    scale = Scale(args.replicas, args.per_replica, args.seed)
    args.output.mkdir(parents=True, exist_ok=True)
    console = Console()
    if not console.is_terminal:
        console.width = 140
    prices = {"LOAD_TOKENS": args.load_tokens, "HOME_DISCOUNT": args.home_discount}
    with mock.patch.multiple(replicas.routing, **prices):
        for name in args.parts or (*PARTS, SPEED):
            began = time.process_time()
            rows = run_part(name, scale, console)
            write(name, rows, scale, time.process_time() - began, args.output)
            if name == "scaling":
                plot.draw(rows, args.output / "scaling.png")
    say(f"results are in {args.output}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, SPEED, []], metavar="PART", help="default: all")
    parser.add_argument("--replicas", type=_at_least(2), default=256, help="the most (default: %(default)s)")
    parser.add_argument(
        "--per-replica",
        type=_at_least(1),
        default=300,
        help="requests measured for each replica (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0)
    constants = (("load-tokens", replicas.routing.LOAD_TOKENS), ("home-discount", replicas.routing.HOME_DISCOUNT))
    for flag, value in constants:
        parser.add_argument(
            f"--{flag}", type=float, default=value, help="in place of replicas/routing.py's %(default)s"
        )
    parser.add_argument("--output", type=Path, default=Path("build/cluster"), help="folder (default: %(default)s)")
    return parser


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}")
        return value

    return number


if __name__ == "__main__":
    sys.exit(main())
