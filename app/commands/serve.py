# SPDX-License-Identifier: Apache-2.0
"""`tessera serve`: serves a model with the chunk cache."""

import os

from app.arguments import parse, refusal
from tools.progress import say


def main(arguments: list[str]) -> int:
    """Serves until stopped. Returns the exit code: 0, 1 if the engine died, 2 for a wrong setting."""
    # vLLM's INFO log would bury our few lines; set the variable to see it.
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
