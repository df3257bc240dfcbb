# SPDX-License-Identifier: Apache-2.0
"""Files of tiers, and the memory that they are read into."""

from cache.tiers.tier import Address

MOST = 10_000


def address(number, part=0, parts=1):
    return Address(f"{number:032x}", part, parts)


def held(tier):
    return {stored.address: stored.num_bytes for stored in tier.list()}


class PinnedMemory:
    """An allocator of pinned memory as PyTorch's: it takes powers of two, and keeps them for the process."""

    def __init__(self) -> None:
        self.taken: list[int] = []

    def allocate(self, num_bytes: int) -> memoryview:
        self.taken.append(1 << (num_bytes - 1).bit_length())
        return memoryview(bytearray(num_bytes))
