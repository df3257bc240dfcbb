# SPDX-License-Identifier: Apache-2.0
"""The log of Tessera's own modules; vLLM configures its own."""

import logging
import re

from pythonjsonlogger.json import JsonFormatter

from app.settings import Settings

_PACKAGES = ("app", "cache", "engine_ext", "kernels", "replicas")
LONGEST_MESSAGE = 4096
"""Characters of a message, without a traceback."""
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_TEXT = "tessera: %(asctime)s %(levelname)s %(message)s"
_JSON = "%(asctime)s %(levelname)s %(name)s %(processName)s %(process)d %(message)s"
"""The fields of vLLM's own log (``--logging-config.formatter json``), so that one parser reads both."""


class OneLine(logging.Filter):
    """Keeps what clients chose, such as names and ids, from looking like lines of the log, or filling it."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Escape control characters of the message, and end it where it is too long."""
        said = record.getMessage()
        if len(said) > LONGEST_MESSAGE:
            said = f"{said[:LONGEST_MESSAGE]}… ({len(said)} characters)"
        record.msg, record.args = _CONTROL.sub(_escaped, said), ()
        return True


def _escaped(found: "re.Match[str]") -> str:
    return found[0].encode("unicode_escape").decode()


def configure_logging(settings: Settings) -> None:
    """Sends the records of Tessera's packages to standard error, in the configured format."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter(_JSON) if settings.log_format == "json" else logging.Formatter(_TEXT))
    handler.addFilter(OneLine())
    for package in _PACKAGES:
        logger = logging.getLogger(package)
        logger.handlers = [handler]
        logger.setLevel(settings.log_level)
        logger.propagate = False
