# SPDX-License-Identifier: Apache-2.0
"""The arguments of ``tessera serve``, and errors that they cause."""

import argparse
import errno

from pydantic import ValidationError

from tools.progress import first_line


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
