# SPDX-License-Identifier: Apache-2.0
"""Tells failures of our own code from a client's errors, inside vLLM's endpoints.

vLLM takes errors of some builtin types for the client's, whoever raises them, and answers 400.
"""

import logging
import traceback
from typing import Final

from engine_ext.client.request import PROGRESS

logger = logging.getLogger(__name__)

_OURS: Final = ("app", "cache", "engine_ext", "kernels", "machine", "replicas")
_CALLED: Final = ("vllm", "fastapi", "starlette")
"""Packages that our code calls with requests, and that call it."""


class DefectError(RuntimeError):
    """Our own code has failed: status 500. The log says where."""


def is_defect(error: BaseException) -> bool:
    """Whether our own code has failed, and not vLLM's or the client.

    The types of our errors, and of vLLM's, say whose fault they are; for others it is the code that raised them, or
    called what did.
    """
    if _root(type(error).__module__) in (*_OURS, *_CALLED):
        return False
    frames = [_root(frame.f_globals.get("__name__", "")) for frame, _ in traceback.walk_tb(error.__traceback__)]
    return next((name in _OURS for name in reversed(frames) if name in (*_OURS, *_CALLED)), False)


def place_of(error: BaseException) -> str:
    """Where an error was raised, without its message, which may quote the prompt."""
    at = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} at {at.filename}:{at.lineno}"


def defect_of(error: BaseException) -> DefectError:
    """Log a defect, and blame the server for what its request gets; return what to raise instead."""
    logger.error("a defect: %s", place_of(error))
    if (progress := PROGRESS.get()) is not None:
        progress.is_servers = True
    return DefectError("The server failed at this request; its log says where.")


def blamed(error: Exception) -> Exception:
    """Return what to raise for an error: a :class:`DefectError` if our own code has failed, else the error itself."""
    return defect_of(error) if is_defect(error) else error


def _root(module: str) -> str:
    return module.partition(".")[0]
