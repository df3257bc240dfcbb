# SPDX-License-Identifier: Apache-2.0
"""Reasons for which segments leave the cache."""

from enum import StrEnum


class Removal(StrEnum):
    """Why an entry can't be found any more."""

    EVICTED = "evicted"
    EXPIRED = "expired"
    DELETED = "deleted"
    CLEARED = "cleared"
    FILL_FAILED = "fill_failed"
    REFUSED = "refused"
    COLLISION = "collision"
    ASLEEP = "asleep"
    RESET = "reset"
    """The weights may have changed, or all KV was to be forgotten."""
