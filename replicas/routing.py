# SPDX-License-Identifier: Apache-2.0
"""Choice of a replica for a request: one pure function, the same on every router.

Each replica has a price in tokens: document tokens that it would have to compute, plus an equivalent of its unfinished
requests. Readers of a document therefore gather at its holder until the holder's load makes computing the document
elsewhere cheaper: hot documents replicate by themselves. A document without a holder draws its request to the
document's home, in proportion to its tokens, so that requests with common documents meet before any replica holds one.
Homes are found by rendezvous hashing (Thaler and Ravishankar, "Using name-based mappings to increase hit rates", 1998).
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import xxhash

from cache.segments.holdings import DocumentKey, Tier
from replicas.registry import Claim

LOAD_TOKENS: Final = 16
"""Price of one unfinished request: low, since an engine batches many (docs/scaling.md)."""
TIER_COST: Final = {Tier.DEVICE: 0.0, Tier.HOST: 0.05, Tier.DISK: 0.2}
"""Cost of loading a document from a tier, as a fraction of computing it."""
HOME_DISCOUNT: Final = 0.25
"""Discount on computing a document without a holder, at its home."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A document of the request; ``tokens`` may be an estimate, which claims override.

    ``is_required``: only a holder can serve the request, which names the document by id without its text.
    """

    key: DocumentKey
    tokens: int
    claims: Sequence[Claim] = ()
    is_required: bool = False


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica that can serve the request; ``load`` counts unfinished requests, ``name`` determines homes.

    ``storages`` are ids of the storage from which it loads documents.
    """

    id: str
    name: str
    load: int = 0
    storages: tuple[str, ...] = ()


class Ranked(NamedTuple):
    """A candidate, the request's document tokens that it holds, and its price in tokens."""

    candidate: Candidate
    held_tokens: int
    price: float


def rank(documents: Iterable[Wanted], candidates: Sequence[Candidate]) -> list[Ranked]:
    """Candidates, cheapest first; deterministic and independent of their order."""
    by_id = {candidate.id: candidate for candidate in candidates}
    reach: defaultdict[str, list[str]] = defaultdict(list)  # from a holder to the candidates that load from it
    for candidate in candidates:
        for holder in (candidate.id, *candidate.storages):
            reach[holder].append(candidate.id)
    names = [candidate.name.encode() for candidate in candidates]
    distinct = {document.key: document for document in documents}
    # Most candidates hold nothing and pay for every token; only holders and homes need entries.
    total, num_required = 0, 0
    held, lacking = Counter[str](), Counter[str]()
    saved: defaultdict[str, float] = defaultdict(float)
    for document in distinct.values():
        # The fastest place of each candidate overwrites the others.
        claims = sorted(document.claims, key=lambda claim: -claim.holding.tier)
        holders = {id: claim.holding for claim in claims for id in reach.get(claim.holder, ())}
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


def _home(digest: bytes, names: Sequence[bytes]) -> int:
    """Index of the name with the greatest hash: adding or removing a name moves few digests."""
    return max(zip(_weights(digest, names), names, range(len(names)), strict=True))[2]


def _weights(digest: bytes, names: Iterable[bytes]) -> list[int]:
    return [xxhash.xxh3_64_intdigest(digest + name) for name in names]
