# SPDX-License-Identifier: Apache-2.0
"""The command ``tessera``."""

import importlib
import sys
from collections.abc import Sequence
from typing import Final, NamedTuple

from machine.process_watch import end_with_starter
from machine.progress import first_line, say
from machine.version import tessera_version, version_of


class Command(NamedTuple):
    """``main`` in ``module`` takes the command's arguments and returns the exit code."""

    module: str
    arguments: str
    text: str


_COMMANDS: Final = {
    "serve": Command(
        "app.commands.serve",
        "[MODEL] [any vllm serve flag] [--chunk-cache-… flag]",
        "serve MODEL (a folder, or a name that vLLM or tessera model knows) over HTTP, reusing document chunks' KV;\n"
        "without MODEL, SmolLM2 with 135 M parameters, downloaded first",
    ),
    "doctor": Command(
        "app.commands.doctor.command",
        "[MODEL] [--json] [any tessera serve flag]",
        "check whether serve would reuse chunks here, with this model and these flags, and what to do if not",
    ),
    "demo": Command(
        "app.commands.demo",
        "[--model MODEL] [--port PORT] [--once]",
        "serve a small model and show in the terminal what happens to documents and questions",
    ),
    "model": Command(
        "app.commands.model", "smollm2|qwen2.5-coder-1.5b", "download a model with real weights, to try things with"
    ),
    "eval": Command(
        "measuring.quality.command",
        "[MODEL | --server URL] [--questions FILE | --demo] [options]",
        "measure accuracy and speed on questions, with full attention and with chunks reused",
    ),
    "calibrate": Command(
        "measuring.quality.calibration",
        "[MODEL] [--questions FILE | --demo] [options]",
        "measure what reuse costs a model, and write a profile for serve --profile",
    ),
    "adapt": Command(
        "training.adapt.command",
        "MODEL --documents FOLDER --output DIR [options]",
        "train an adapter for serve --chunk-adapter, by the model's own full attention over any documents",
    ),
    "bench": Command(
        "measuring.speed.command",
        "[WORKLOAD ...] [options] [any vllm serve flag]",
        "measure speed beside stock vLLM, both on the same model and requests",
    ),
    "route": Command(
        "app.cluster.router.command",
        "[--registry URL] [--host HOST] [--port PORT]",
        "one address for many replicas that serve with --registry",
    ),
    "cluster": Command(
        "app.commands.cluster",
        "[MODEL] [--replicas N | --prefill N --decode N] [--port PORT] [any tessera serve flag]",
        "run Redis, replicas and a router on this machine",
    ),
    "cache": Command(
        "app.commands.cache",
        "ls|verify|gc|export|import DIRECTORY",
        "list, check, clean up and move the files of a directory tier",
    ),
    "ingest": Command(
        "app.commands.ingest",
        "FOLDER --collection NAME [--server URL] [options]",
        "put the files of a folder into a server's collection, for questions to retrieve passages from",
    ),
    "key": Command("app.commands.key", "TENANT [--role chat|ingest|admin]", "make an API key for serve --tenants"),
}

_ENGINE: Final = "[cpu]' (or [cuda], [ascend])"
_EXTRAS: Final = {
    "vllm": _ENGINE,
    "torch": _ENGINE,
    "transformers": _ENGINE,
    "tokenizers": _ENGINE,
    "safetensors": _ENGINE,
    "huggingface_hub": _ENGINE,
    "psutil": _ENGINE,
    "peft": "[adapt]'",
    "matplotlib": "[measure]'",
    "gguf": "[models]'",
    "accelerate": "[models]'",
}
"""Ends of the requirement that brings a module."""


def _usage() -> str:
    calls = [f"tessera {name} {command.arguments}" for name, command in _COMMANDS.items()]
    texts = [f"  {name:9} {command.text}" for name, command in _COMMANDS.items()]
    return "\n".join(
        [
            "usage: " + "\n       ".join([*calls, "tessera --version"]),
            "\ncommands:",
            *(text.replace("\n", "\n" + 12 * " ") for text in texts),
            "\ntessera serve --help shows the flags, tessera serve --help=all vLLM's as well.",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    0; 1 if the command has failed, 2 for a usage or configuration error, 130 when interrupted.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = arguments[0] if arguments else "--help"
    if command in ("-h", "--help", "help"):
        print(_usage())
        return 0
    if command == "--version":
        print(f"tessera {tessera_version()}")
        return 0
    if command not in _COMMANDS:
        say(f"unknown command {command!r}")
        print(_usage(), file=sys.stderr)
        return 2
    end_with_starter()
    try:
        exit_code: int = importlib.import_module(_COMMANDS[command].module).main(arguments[1:])
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        if (extra := _EXTRAS.get(package)) is None:
            raise
        is_missing = isinstance(error, ModuleNotFoundError) and error.name == package
        problem = (
            f"needs {package}" if is_missing else f"can't use {package} {version_of(package)} ({first_line(error)})"
        )
        say(f"tessera {command} {problem}: pip install 'tessera-rag{extra}")
        return 2
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
