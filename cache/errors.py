# SPDX-License-Identifier: Apache-2.0
"""What can go wrong in the chunk cache's books."""


class ChunkCacheError(Exception):
    """Base of this package's errors."""


class CapacityError(ChunkCacheError):
    """The segments of one request can't all be held at once. Nothing was taken; run in full attention."""


class IntegrityError(ChunkCacheError):
    """The manager's books don't balance: a defect. The cache must not be used any further."""
