# SPDX-License-Identifier: Apache-2.0
"""Which replica a request goes to: one pure function, for every host that asks.

Each replica has a price, in tokens: those of the request's documents that it would have to compute, and those that the
requests before it stand for. So a document's readers gather where it is, until its holder has so much to do that to
compute it once more elsewhere is cheaper: hot documents get more replicas by themselves. What nobody holds goes,
document by document, to its home, weighted by its tokens, so that requests that have documents in common meet before
anybody holds one. Homes are found by rendezvous hashing (Thaler and Ravishankar, "Using name-based mappings to increase
hit rates", 1998).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import xxhash

from cache.registry import Claim, DocumentKey, Tier

LOAD_TOKENS: Final = 16
"""What one unfinished request is worth: little, since an engine computes many at once (docs/scaling.md)."""
TIER_COST: Final = {Tier.DEVICE: 0.0, Tier.HOST: 0.05, Tier.DISK: 0.2}
"""What it costs to bring a document from a tier, as a share of computing it."""
HOME_DISCOUNT: Final = 0.25
"""How much less the computing of a document counts that nobody holds, at its home."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A document of the request. ``tokens`` may be estimated: claims know better.

    ``is_required``: only who claims the document can serve it, since the request names it and doesn't bring it.
    """

    key: DocumentKey
    tokens: int
    claims: Sequence[Claim] = ()
    is_required: bool = False


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica that can serve the request. ``load`` counts its unfinished requests; homes go by ``name``."""

    id: str
    name: str
    load: int = 0


@dataclass(frozen=True, slots=True)
class Ranked:
    """A candidate with what it holds of the request's documents, in tokens, and its price, also in tokens."""

    candidate: Candidate
    held_tokens: int
    price: float


def rank(documents: Iterable[Wanted], candidates: Sequence[Candidate]) -> list[Ranked]:
    """The candidates, the cheapest first; deterministic, whatever their order."""
    least = min((candidate.load for candidate in candidates), default=0)
    prices = {candidate.id: float(LOAD_TOKENS * (candidate.load - least)) for candidate in candidates}
    held = dict.fromkeys(prices, 0)
    required = dict.fromkeys(prices, 0)
    distinct = {document.key: document for document in documents}
    for document in distinct.values():
        holders = {claim.replica: claim.holding for claim in document.claims if claim.replica in prices}
        tokens = max((holding.tokens for holding in holders.values()), default=document.tokens)
        home = None if holders else home_of(document.key.digest, candidates)
        for id in prices:
            if (holding := holders.get(id)) is not None:
                held[id] += holding.tokens
                prices[id] += TIER_COST[holding.tier] * tokens
            else:
                prices[id] += tokens * (1 - HOME_DISCOUNT if home is not None and id == home.id else 1)
                required[id] += document.is_required
    ranked = [Ranked(candidate, held[candidate.id], prices[candidate.id]) for candidate in candidates]
    tie = b"".join(sorted(key.digest for key in distinct))
    return sorted(ranked, key=lambda each: (required[each.candidate.id], each.price, -_weight(tie, each.candidate)))


def home_of(digest: bytes, candidates: Sequence[Candidate]) -> Candidate | None:
    """The candidate whose name, hashed with ``digest``, is greatest: few digests move when one comes or goes."""
    return max(candidates, key=lambda candidate: (_weight(digest, candidate), candidate.name), default=None)


def _weight(digest: bytes, candidate: Candidate) -> int:
    return xxhash.xxh3_64_intdigest(digest + candidate.name.encode())
