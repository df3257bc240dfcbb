# SPDX-License-Identifier: Apache-2.0
"""Files of tiers."""

from cache.tiers.tier import Address

MOST = 10_000


def address(number, rank=0, ranks=1):
    return Address(f"{number:032x}", rank, ranks)


def held(tier):
    return {stored.address: stored.num_bytes for stored in tier.list()}
