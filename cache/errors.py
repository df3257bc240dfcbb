# SPDX-License-Identifier: Apache-2.0
"""Errors of the chunk cache."""


class ChunkCacheError(Exception):
    """Base class of this package's errors."""


class CapacityError(ChunkCacheError):
    """The pool can't hold all segments of a request. Nothing was allocated; run in full attention."""


class EmptySegmentError(ChunkCacheError, ValueError):
    """A question or a document has no tokens; an engine computes at least one."""


class UnknownSegmentError(ChunkCacheError):
    """No cached segment that the caller may see has the key."""


class IntegrityError(ChunkCacheError):
    """The manager's books don't balance: a defect. The cache must not be used further."""


class FullAttentionError(Exception):
    """A request can't be served from the chunk cache; the message says why. The client got no output yet.

    ``kind`` is one of a few words, for metrics.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind
