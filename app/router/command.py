# SPDX-License-Identifier: Apache-2.0
"""The command ``tessera route``."""

import argparse
import logging
from collections.abc import Sequence
from contextlib import suppress

import uvicorn
from pydantic import ValidationError

from app.progress import say
from app.router.app import build_app
from app.router.settings import RouterSettings

GRACE_S = 10
"""How long answers may go on after SIGTERM or SIGINT."""


def parser() -> argparse.ArgumentParser:
    """The command's flags; those not given stay absent from what it parses."""
    made = argparse.ArgumentParser(
        prog="tessera route",
        description="One address for many replicas: each request goes where most of its documents are cached.",
        argument_default=argparse.SUPPRESS,
    )
    for name, field in RouterSettings.model_fields.items():
        text = f"{field.description} (default: {field.default})" if field.default is not None else field.description
        made.add_argument("--" + name.replace("_", "-"), metavar="VALUE", help=f"{text}; TESSERA_{name.upper()}")
    return made


def main(arguments: Sequence[str]) -> int:
    """Routes until SIGINT or SIGTERM; returns the exit code."""
    logging.basicConfig(level=logging.INFO, format="tessera: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        settings = RouterSettings(**vars(parser().parse_args(arguments)))
        app = build_app(settings)
    except ValidationError as error:
        first = error.errors()[0]
        say(f"--{str(first['loc'][0]).replace('_', '-')}: {first['msg']} (got {first['input']!r})")
        return 2
    except ValueError as error:  # the registry's URL
        say(f"--registry: {error}")
        return 2
    config = uvicorn.Config(
        app,
        settings.host,
        settings.port,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=GRACE_S,
    )
    try:
        sock = config.bind_socket()
    except SystemExit:
        return 2
    say(f"routing at http://{settings.host}:{sock.getsockname()[1]}; stop with Ctrl-C")
    with suppress(KeyboardInterrupt):
        uvicorn.Server(config).run(sockets=[sock])
    say("stopped")
    return 0
