# SPDX-License-Identifier: Apache-2.0
"""An allocator of pinned memory, as PyTorch's."""


class PinnedMemory:
    """Takes powers of two, and keeps them for the process."""

    def __init__(self) -> None:
        self.taken: list[int] = []

    def allocate(self, num_bytes: int) -> memoryview:
        self.taken.append(1 << (num_bytes - 1).bit_length())
        return memoryview(bytearray(num_bytes))
