# SPDX-License-Identifier: Apache-2.0
"""Arguments of ``tessera serve``, and messages for the errors that they cause."""

import argparse
import errno
import sys
from typing import Final

from pydantic import ValidationError

from machine.progress import first_line

_USAGE: Final = """\
usage: {} [MODEL] [flags]

Serve a model with the chunk cache (docs/operations.md). Each flag is also TESSERA_<NAME> in the environment.
Every flag of vllm serve works too: --help=all, --help=GROUP, --help=listgroup."""


def parse(arguments: list[str], prog: str = "tessera serve") -> argparse.Namespace:
    """Parses the flags of ``tessera serve``, including vLLM's. Exits with 2 for an unknown flag, with 0 after help.

    Without a model, those of the default model are the defaults.
    """
    from app.models.default_model import DEFAULT_DTYPE
    from app.settings import add_flags, add_missing_flags, flag_lines

    if {"-h", "--help"} & set(arguments):
        print(_USAGE.format(prog), *flag_lines(), sep="\n")
        sys.exit(0)
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
    parser.set_defaults(enable_prompt_tokens_details=True)  # clients show usage's cached tokens
    args: argparse.Namespace = parser.parse_args(_with_upper_level(arguments))
    if args.model_tag is None:
        parser.set_defaults(dtype=DEFAULT_DTYPE, enforce_eager=True)
        args = parser.parse_args(_with_upper_level(arguments))
    validate_parsed_serve_args(args)
    return args


def _with_upper_level(arguments: list[str]) -> list[str]:
    """Accepts ``--log-level info``, of which vLLM wants upper case."""
    taken = list(arguments)
    for place, argument in enumerate(arguments):
        name, is_joined, value = argument.partition("=")
        if name in ("--log-level", "--log_level"):
            if is_joined:
                taken[place] = f"{name}={value.upper()}"
            else:
                taken[place + 1 : place + 2] = [each.upper() for each in arguments[place + 1 : place + 2]]
    return taken


def refusal(error: Exception, args: argparse.Namespace) -> str | None:
    """One line about an ``error`` that the command caused; ``None`` for any other error."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    from app.access.exposure import ExposedError
    from app.access.tenants import TenantsFileError
    from app.advice import off_message
    from app.collections.retrievers import UnknownRetrieverError
    from app.documents.patterns import PatternError
    from app.models.packaged_models import PackagedModelError
    from app.profile import ProfileError
    from app.settings import UnknownSettingError
    from cache.tiers.tier import TierConfigError
    from engine_ext.start.startup import RequiredCacheError
    from engine_ext.start.support import UnsupportedFlagError

    if isinstance(error, ValidationError):
        return _first_error(error)
    ours = (ExposedError, TenantsFileError, UnknownRetrieverError, UnknownSettingError, UnsupportedFlagError)
    if isinstance(error, (*ours, PackagedModelError, PatternError, TierConfigError, ProfileError)):
        return str(error)
    if isinstance(error, RequiredCacheError):
        return f"not started (--chunk-cache require). {off_message(str(error))}"
    if isinstance(error, HFValidationError | HfHubHTTPError | LocalEntryNotFoundError):
        return f"model {args.model}: no such folder, and not available from the model hub: {first_line(error)}"
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return f"port {args.port} is in use; choose another with --port"
    return None


def _first_error(error: ValidationError) -> str:
    """Formats the first error, with the setting at fault; errors of vLLM's configurations name none."""
    first = error.errors()[0]
    if not first["loc"]:
        return " ".join(first["msg"].split())
    name = str(first["loc"][0])
    given = "" if "secret" in name else f" (got {first['input']!r})"
    return f"--{name.replace('_', '-')}: {first['msg']}{given}"
