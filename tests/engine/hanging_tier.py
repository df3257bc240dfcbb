# SPDX-License-Identifier: Apache-2.0
"""A third-party tier in a directory whose reads hang while a marker file exists."""

import time
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import SplitResult

from cache.tiers.config import Allocate
from cache.tiers.directory import DirectoryTier
from cache.tiers.tier import Address, Buffer

SCHEME = "hangs"
METADATA = "Metadata-Version: 2.1\nName: hanging\nVersion: 1\n"
ENTRY_POINTS = f"[tessera.tiers]\n{SCHEME} = {__name__}:make\n"


def says_so(root: Path) -> Path:
    return root.with_suffix(".hangs")


class HangingTier(DirectoryTier):
    def get(self, address: Address, max_bytes: int) -> Buffer | None:
        while says_so(self.root).exists():
            time.sleep(0.05)
        return super().get(address, max_bytes)


def make(url: SplitResult, max_bytes: int, _: Mapping[str, str], __: Allocate | None) -> HangingTier:
    return HangingTier(Path(url.path), max_bytes)
