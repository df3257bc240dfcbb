# SPDX-License-Identifier: Apache-2.0
"""Order and time limit of a run of tests, for runs that can't finish the suite (`make test-rest`)."""

import subprocess
from collections import Counter
from pathlib import Path

COMMITS = 50
"""How many of the last commits count."""


def lines_changed(repository: Path) -> Counter[str]:
    """Lines added and removed in the last commits, by file; empty without git."""
    command = ["git", "-C", str(repository), "log", f"-{COMMITS}", "--numstat", "--format=", "--no-renames"]
    try:
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return Counter()
    changed: Counter[str] = Counter()
    for line in listing.splitlines():
        added, removed, name = line.split("\t")
        if added != "-":  # a binary file
            changed[name] += int(added) + int(removed)
    return changed
