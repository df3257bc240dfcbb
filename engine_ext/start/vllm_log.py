# SPDX-License-Identifier: Apache-2.0
"""vLLM's log in a file: at a terminal it would bury Tessera's few lines.

vLLM passes the path of its logging configuration to all processes of an engine (:envvar:`VLLM_LOGGING_CONFIG_PATH`);
the configuration beside this module sends warnings to standard error, too.
"""

import logging
import os
import re
import socket
import time
from collections.abc import MutableMapping, Sequence
from contextlib import suppress
from logging.handlers import WatchedFileHandler
from pathlib import Path
from typing import Final

from machine.folders import tessera_home

_CONFIG: Final = Path(__file__).with_name("vllm_logging.json")
_FILE: Final = "_TESSERA_VLLM_LOG"
_MAX_BYTES: Final = 64 << 20
_KEPT_S: Final = 7 * 86400
_FLAGS: Final = ("--log-level", "--logging-config", "--log-config-file")
_ERROR: Final = re.compile(
    r"^(?:\([^)]*\) )?(?:ERROR \S+ \S+ \[[^]]*\] )?((?:\w+\.)*\w*(?:Error|Exception): .+)$", re.M
)
_CONSEQUENCE: Final = re.compile("(?:Engine core|WorkerProc) initialization failed")


class LogFile(WatchedFileHandler):
    """A file of several processes: whichever finds it full puts it aside, and all go on in a new one."""

    def __init__(self) -> None:
        super().__init__(os.environ[_FILE], encoding="utf-8")

    def emit(self, record: logging.LogRecord) -> None:
        """Writes the record."""
        with suppress(FileNotFoundError):  # another process has just put it aside
            if Path(self.baseFilename).stat().st_size > _MAX_BYTES:
                _put_aside(Path(self.baseFilename))
        super().emit(record)


def log_to_file(arguments: Sequence[str], environment: MutableMapping[str, str]) -> Path | None:
    """Sends vLLM's log to a file, unless arguments or environment configure it.

    Returns the file. Raises ``OSError`` if the file can't be written.
    """
    level = _value(arguments, "--log-level") or "WARNING"
    if _is_configured(arguments, environment):
        environment.setdefault("VLLM_LOGGING_LEVEL", level.upper())
        return None
    folder = tessera_home() / "vllm"
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.log"):
        with suppress(FileNotFoundError):  # another start was faster
            if time.time() - old.stat().st_mtime > _KEPT_S:
                old.unlink()
    # Containers may share the folder.
    file = folder / f"{socket.gethostname()}-{_value(arguments, '--port') or 8000}.log"
    _put_aside(file)
    file.touch()
    environment[_FILE], environment["VLLM_LOGGING_CONFIG_PATH"] = str(file), str(_CONFIG)
    return file


def log_file() -> Path | None:
    """The file with vLLM's log, if it has one."""
    file = os.environ.get(_FILE)
    return Path(file) if file else None


def telling_lines(log: str) -> list[str]:
    """The last two distinct errors in a log, without mere reports of a failed start."""
    errors = [error for error in dict.fromkeys(_ERROR.findall(log)) if not _CONSEQUENCE.search(error)]
    return errors[-2:]


def _is_configured(arguments: Sequence[str], environment: MutableMapping[str, str]) -> bool:
    flags = [argument.partition("=")[0].replace("_", "-") for argument in arguments if argument.startswith("--")]
    # Ray's workers may run on machines without the configuration's file.
    return (
        any(flag.startswith(_FLAGS) for flag in flags)
        or any(name.startswith("VLLM_LOGGING_") for name in environment)
        or "VLLM_CONFIGURE_LOGGING" in environment
        or _value(arguments, "--distributed-executor-backend") == "ray"
    )


def _value(arguments: Sequence[str], flag: str) -> str | None:
    """A flag's value, found before vLLM is imported, as is its parser."""
    for argument, following in zip(arguments, [*arguments, ""][1:], strict=True):
        name, _, value = argument.partition("=")
        if name.startswith("--") and name.replace("_", "-") == flag:
            return value or following
    return None


def _put_aside(file: Path) -> None:
    with suppress(FileNotFoundError):
        file.replace(file.with_suffix(".previous.log"))
