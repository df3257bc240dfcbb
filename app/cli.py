# SPDX-License-Identifier: Apache-2.0
"""The command ``tessera``."""

import argparse
import errno
import importlib.metadata
import os
import sys
from collections.abc import Callable, Sequence

from pydantic import ValidationError

from tools.process_watch import end_with_starter
from tools.progress import first_line, say

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
    return _COMMANDS[command](arguments[1:])


def _serve(arguments: list[str]) -> int:
    # vLLM's INFO log would bury the few lines that matter here; set the variable to see it.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    try:
        args = parse(arguments)
    except ImportError as error:
        say(f"{error}: install an engine with pip install 'tessera-rag[cpu]' (or [cuda], [ascend]); see tessera doctor")
        return 2
    import uvloop

    from app.models.default_model import default_model
    from app.server import run
    from app.settings import load_settings

    try:
        settings = load_settings(args)
        args.model = args.model_tag or default_model()
        args.enforce_eager |= args.model_tag is None  # compiling so small a model takes longer than it saves
        return uvloop.run(run(args, settings))
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    except Exception as error:
        if (words := refusal(error, args)) is None:
            raise
        say(words)
        return 2


def parse(arguments: list[str], prog: str = "tessera serve") -> argparse.Namespace:
    """The flags of ``tessera serve``, vLLM's among them. Exits with 2 for one that there is not."""
    from app.settings import add_flags, add_missing_flags
    from engine_ext.wire.vllm_compat import (
        FlexibleArgumentParser,
        cli_env_setup,
        make_arg_parser,
        validate_parsed_serve_args,
    )

    cli_env_setup()
    parser = FlexibleArgumentParser(prog=prog, description="Serve a model with the chunk cache.")
    add_flags(parser)
    parser = make_arg_parser(parser)
    add_missing_flags(parser)
    args: argparse.Namespace = parser.parse_args(arguments)
    validate_parsed_serve_args(args)
    return args


def refusal(error: Exception, args: argparse.Namespace) -> str | None:
    """What is wrong with the command that ``error`` came of, in one line; ``None`` if something else is wrong."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    from app.access.exposure import ExposedError
    from app.access.tenants import TenantsFileError
    from app.profile import ProfileError
    from app.settings import UnknownSettingError
    from cache.tiers.tier import TierConfigError
    from engine_ext.start.support import UnsupportedFlagError

    if isinstance(error, ValidationError):
        return _first_error(error)
    ours = (ExposedError, TenantsFileError, UnknownSettingError, UnsupportedFlagError, TierConfigError, ProfileError)
    if isinstance(error, ours):
        return str(error)
    if isinstance(error, HFValidationError | HfHubHTTPError | LocalEntryNotFoundError):
        return f"model {args.model}: no such folder, and not to be had from the model hub: {first_line(error)}"
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return f"port {args.port} is in use; choose another with --port"
    return None


def _first_error(error: ValidationError) -> str:
    """Names the setting at fault; vLLM's own configurations have a message only."""
    first = error.errors()[0]
    if not first["loc"]:
        return " ".join(first["msg"].split())
    name = str(first["loc"][0])
    given = "" if "secret" in name else f" (got {first['input']!r})"
    return f"--{name.replace('_', '-')}: {first['msg']}{given}"


def _doctor(arguments: list[str]) -> int:
    from app.commands.doctor.command import main

    return main(arguments)


def _demo(arguments: list[str]) -> int:
    from app.commands.demo import main

    return main(arguments)


def _model(arguments: list[str]) -> int:
    from app.commands.model import main

    return main(arguments)


def _eval(arguments: list[str]) -> int:
    from evaluation.command import main

    return main(arguments)


def _calibrate(arguments: list[str]) -> int:
    from evaluation.calibration import main

    return main(arguments)


def _bench(arguments: list[str]) -> int:
    from benchmarks.command import main

    return main(arguments)


def _route(arguments: list[str]) -> int:
    from app.cluster.router.command import main

    return main(arguments)


def _cluster(arguments: list[str]) -> int:
    from app.commands.cluster import main

    return main(arguments)


def _cache(arguments: list[str]) -> int:
    from app.commands.cache import main

    return main(arguments)


def _key(arguments: list[str]) -> int:
    from app.commands.key import main

    return main(arguments)


_COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "serve": _serve,
    "doctor": _doctor,
    "demo": _demo,
    "model": _model,
    "eval": _eval,
    "calibrate": _calibrate,
    "bench": _bench,
    "route": _route,
    "cluster": _cluster,
    "cache": _cache,
    "key": _key,
}


if __name__ == "__main__":
    sys.exit(main())
