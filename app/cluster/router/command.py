# SPDX-License-Identifier: Apache-2.0
"""The command ``tessera route``."""

import argparse
import logging
from collections.abc import Sequence
from contextlib import suppress

import uvicorn
from pydantic import ValidationError

from app.access.client_limits import BoundedProtocol
from app.access.exposure import ExposedError, checked_host, known_tenants
from app.access.tenants import TenantsFileError
from app.cluster.router.app import build_app
from app.cluster.router.settings import RouterSettings
from app.documents.patterns import PatternError
from app.logs import OneLine
from app.settings import add_flags_of
from machine.progress import say
from machine.server_process import ended_by_signals

GRACE_S = 10
"""Seconds that responses may continue after SIGTERM or SIGINT."""


def parser() -> argparse.ArgumentParser:
    """The command's parser; flags that are not given stay absent from its result."""
    made = argparse.ArgumentParser(
        prog="tessera route",
        description="One address for many replicas: each request goes where most of its documents are cached. Each "
        "flag is also TESSERA_<NAME> in the environment.",
        argument_default=argparse.SUPPRESS,
    )
    add_flags_of(RouterSettings, made)
    return made


def main(arguments: Sequence[str]) -> int:
    """Routes until SIGINT or SIGTERM; returns the exit code."""
    logging.basicConfig(level=logging.INFO, format="tessera: %(message)s")
    for handler in logging.getLogger().handlers:
        handler.addFilter(OneLine())
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        config = _configured(arguments)
    except ValidationError as error:
        first = error.errors()[0]
        say(f"--{str(first['loc'][0]).replace('_', '-')}: {first['msg']} (got {first['input']!r})")
        return 2
    except (ExposedError, TenantsFileError, PatternError) as error:
        say(str(error))
        return 2
    except ValueError as error:  # the registry's URL
        say(f"--registry: {error}")
        return 2
    try:
        sock = config.bind_socket()
    except SystemExit:
        return 2
    say(f"routing at http://{config.host}:{sock.getsockname()[1]}; stop with Ctrl-C")
    with suppress(KeyboardInterrupt), ended_by_signals():  # the server raises the signal again when it has stopped
        uvicorn.Server(config).run(sockets=[sock])
    say("stopped")
    return 0


def _configured(arguments: Sequence[str]) -> uvicorn.Config:
    """The HTTP server with the router as its application; raises ``ValueError`` for wrong settings."""
    settings = RouterSettings(**vars(parser().parse_args(arguments)))
    tenants = known_tenants(settings.tenants)
    return uvicorn.Config(
        build_app(settings, tenants),
        checked_host(settings.host, tenants, allow_anonymous=settings.allow_anonymous),
        settings.port,
        http=BoundedProtocol,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=GRACE_S,
    )
