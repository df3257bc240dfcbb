# SPDX-License-Identifier: Apache-2.0
"""Command lines of measurements."""

import argparse
from typing import NoReturn


class UsageError(ValueError):
    """The command line is wrong; the message says why."""


class Parser(argparse.ArgumentParser):
    """A parser without abbreviations, whose errors are :class:`UsageError`."""

    def __init__(self, prog: str, usage: str, description: str, epilog: str) -> None:
        form = argparse.RawDescriptionHelpFormatter
        super().__init__(prog, usage, description, epilog, formatter_class=form, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} ({self.prog} --help shows the options)")


def positive(text: str) -> int:
    """A whole number of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


positive.__name__ = "whole number"  # argparse's messages have it
