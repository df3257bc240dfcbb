# SPDX-License-Identifier: Apache-2.0
"""Reasons for which segments leave the cache."""

from enum import StrEnum
from typing import Final


class Removal(StrEnum):
    """Reason for which an entry was detached."""

    EVICTED = "evicted"
    EXPIRED = "expired"
    DELETED = "deleted"
    CLEARED = "cleared"
    FILL_FAILED = "fill_failed"
    REFUSED = "refused"
    COLLISION = "collision"
    ASLEEP = "asleep"
    RESET = "reset"
    """New weights, or a reset of all KV."""


FOR_GOOD: Final = frozenset({Removal.EXPIRED, Removal.DELETED, Removal.CLEARED})
"""Reasons for which a segment leaves all tiers, too."""
