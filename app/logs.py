# SPDX-License-Identifier: Apache-2.0
"""The log of Tessera's own modules; vLLM configures its own."""

import logging

from pythonjsonlogger.json import JsonFormatter

from app.settings import Settings

_PACKAGES = ("app", "cache", "engine_ext", "kernels")
_TEXT = "tessera: %(asctime)s %(levelname)s %(message)s"
_JSON = "%(asctime)s %(levelname)s %(name)s %(processName)s %(process)d %(message)s"
"""The fields of vLLM's own log (``--logging-config.formatter json``), so that one parser reads both."""


def configure_logging(settings: Settings) -> None:
    """Sends the records of Tessera's packages to standard error, in the configured format."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter(_JSON) if settings.log_format == "json" else logging.Formatter(_TEXT))
    for package in _PACKAGES:
        logger = logging.getLogger(package)
        logger.handlers = [handler]
        logger.setLevel(settings.log_level)
        logger.propagate = False
