# SPDX-License-Identifier: Apache-2.0
"""Which replica a request goes to: one pure function, for every host that asks.

Each replica has a price, in tokens: those of the request's documents that it would have to compute, and those that the
requests before it stand for. So a document's readers gather where it is, until its holder has so much to do that to
compute it once more elsewhere is cheaper: hot documents get more replicas by themselves. What nobody holds goes,
document by document, to its home, weighted by its tokens, so that requests that have documents in common meet before
anybody holds one. Homes are found by rendezvous hashing (Thaler and Ravishankar, "Using name-based mappings to increase
hit rates", 1998).
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import xxhash

from cache.segments.holdings import DocumentKey, Tier
from replicas.registry import Claim

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


class Ranked(NamedTuple):
    """A candidate with what it holds of the request's documents, in tokens, and its price, also in tokens."""

    candidate: Candidate
    held_tokens: int
    price: float


def rank(documents: Iterable[Wanted], candidates: Sequence[Candidate]) -> list[Ranked]:
    """The candidates, the cheapest first; deterministic, whatever their order."""
    by_id = {candidate.id: candidate for candidate in candidates}
    names = [candidate.name.encode() for candidate in candidates]
    distinct = {document.key: document for document in documents}
    # Most candidates hold nothing: they pay for all, and only the others are told apart.
    total, num_required = 0, 0
    held, lacking = Counter[str](), Counter[str]()
    saved: defaultdict[str, float] = defaultdict(float)
    for document in distinct.values():
        holders = {claim.replica: claim.holding for claim in document.claims if claim.replica in by_id}
        tokens = max((holding.tokens for holding in holders.values()), default=document.tokens)
        total += tokens
        num_required += document.is_required
        for id, holding in holders.items():
            held[id] += holding.tokens
            saved[id] += (1 - TIER_COST[holding.tier]) * tokens
            lacking[id] -= document.is_required
        if not holders and candidates:
            saved[candidates[_home(document.key.digest, names)].id] += HOME_DISCOUNT * tokens
    least = min((candidate.load for candidate in candidates), default=0)
    prices = {id: total - saved.get(id, 0) + LOAD_TOKENS * (each.load - least) for id, each in by_id.items()}
    weights = _weights(b"".join(sorted(key.digest for key in distinct)), names)
    order = [
        (num_required + lacking[candidate.id], prices[candidate.id], -weight, candidate.id)
        for candidate, weight in zip(candidates, weights, strict=True)
    ]
    return [Ranked(by_id[id], held[id], price) for _, price, _, id in sorted(order)]


def home_of(digest: bytes, candidates: Sequence[Candidate]) -> Candidate | None:
    """Whoever a document goes to that nobody holds; ``None`` without candidates."""
    names = [candidate.name.encode() for candidate in candidates]
    return candidates[_home(digest, names)] if candidates else None


def _home(digest: bytes, names: Sequence[bytes]) -> int:
    """Index of the name that, hashed with ``digest``, is greatest: few digests move when one comes or goes."""
    return max(zip(_weights(digest, names), names, range(len(names)), strict=True))[2]


def _weights(digest: bytes, names: Iterable[bytes]) -> list[int]:
    return [xxhash.xxh3_64_intdigest(digest + name) for name in names]
