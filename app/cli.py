# SPDX-License-Identifier: Apache-2.0
"""The command ``tessera``."""

import importlib
import importlib.metadata
import sys
from collections.abc import Sequence
from typing import Final

from tools.process_watch import end_with_starter
from tools.progress import say

_USAGE = """usage: tessera serve [MODEL] [any vllm serve flag] [--chunk-cache-… flag]
       tessera doctor [MODEL] [--json] [any tessera serve flag]
       tessera demo [--port PORT] [--once]
       tessera model smollm2|gemma3-270m
       tessera eval [MODEL | --server URL] [--questions FILE | --demo] [options]
       tessera calibrate [MODEL] [--questions FILE | --demo] [options]
       tessera bench [WORKLOAD ...] [options] [any vllm serve flag]
       tessera route [--registry URL] [--host HOST] [--port PORT]
       tessera cluster [MODEL] [--replicas N] [--port PORT] [any tessera serve flag]
       tessera cache ls|verify|gc|export|import DIRECTORY
       tessera key TENANT [--role chat|ingest|admin]
       tessera --version

commands:
  serve     serve MODEL (a folder or a name vLLM knows) over HTTP, reusing document chunks' KV cache;
            without MODEL, SmolLM2 with 135 M parameters, downloaded first
  doctor    would serve reuse chunks here, with this model and these flags? If not: why, and what to do
  demo      serve a small model and show in the terminal what happens to documents and questions
  model     download a small model with real weights, to try things with
  eval      measure accuracy and speed on questions, with full attention and with chunks reused
  calibrate find out what reuse costs a model, and write a profile that serve --profile follows
  bench     measure speed beside stock vLLM, both on the same model and requests
  route     one address for many replicas that serve with --registry
  cache     look at, check, tidy up and move what a directory tier has
  cluster   Redis, replicas and a router on this machine
  key       make an API key for serve --tenants

tessera serve --help shows the flags, tessera serve --help=all vLLM's as well."""


_COMMANDS: Final = {
    "serve": "app.commands.serve",
    "doctor": "app.commands.doctor.command",
    "demo": "app.commands.demo",
    "model": "app.commands.model",
    "eval": "measuring.quality.command",
    "calibrate": "measuring.quality.calibration",
    "bench": "measuring.speed.command",
    "route": "app.cluster.router.command",
    "cluster": "app.commands.cluster",
    "cache": "app.commands.cache",
    "key": "app.commands.key",
}
"""The module of each command, whose ``main`` takes the arguments and returns the exit code."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code.

    0, 1 if what it runs has failed, 2 for a usage or configuration error, 130 when interrupted.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = arguments[0] if arguments else "--help"
    if command in ("-h", "--help", "help"):
        print(_USAGE)
        return 0
    if command == "--version":
        print(f"tessera {importlib.metadata.version('tessera-rag')}")
        return 0
    if command not in _COMMANDS:
        say(f"unknown command {command!r}")
        print(_USAGE, file=sys.stderr)
        return 2
    end_with_starter()
    exit_code: int = importlib.import_module(_COMMANDS[command]).main(arguments[1:])
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
