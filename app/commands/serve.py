# SPDX-License-Identifier: Apache-2.0
"""`tessera serve`: serves a model with the chunk cache."""

import os
import traceback
from pathlib import Path

from app.arguments import parse, refusal
from engine_ext.start.vllm_log import log_file, log_to_file, telling_lines
from machine.progress import first_line, say, show
from machine.server_process import FAILED


def main(arguments: list[str]) -> int:
    """Serves until stopped. Returns the exit code: 0, 1 if the engine failed, 2 for a wrong setting."""
    try:
        log_to_file(arguments, os.environ)
    except (OSError, RuntimeError) as error:  # nothing can be written, or there is no home folder
        say(f"vLLM's log is left out: {error}")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    args = parse(arguments)
    import uvloop

    from app.models.default_model import default_model
    from app.models.packaged_models import local_model
    from app.server import run
    from app.settings import load_settings

    try:
        settings = load_settings(args)
        args.model = local_model(args.model_tag) if args.model_tag else default_model()
        if log_file() is not None:
            args.use_tqdm_on_load = False  # bars of vLLM's processes, between our lines
        return uvloop.run(run(args, settings))
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    except Exception as error:
        if (words := refusal(error, args)) is not None:
            say(words)
            return 2
        if (log := log_file()) is None:
            raise
        traceback.print_exc()
        show(f"{FAILED}{_reason(error, log)}; vLLM's log is in {log}")
        return 1


def _reason(error: Exception, log: Path) -> str:
    """The reason of a failed start, which an engine's processes only log."""
    lines = telling_lines(log.read_text(encoding="utf-8", errors="replace"))
    return "; ".join(lines or [first_line(error)])
