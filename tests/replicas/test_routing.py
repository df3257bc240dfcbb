# SPDX-License-Identifier: Apache-2.0
"""Choice of a replica: a pure function."""

from collections import Counter
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from cache.segments.holdings import Holding, Tier
from replicas.registry import Claim
from replicas.routing import LOAD_TOKENS, Candidate, Wanted, rank
from tests.cache.helpers import key


def replicas(number, loads=()):
    given = [*loads, *[0] * number]
    return [Candidate(f"id{i}", f"replica-{i}", given[i]) for i in range(number)]


def held_by(*ids, tokens=1000, tier=Tier.DEVICE):
    return [Claim(id, Holding(tier, tokens)) for id in ids]


def first(documents, candidates):
    return rank(documents, candidates)[0].candidate.id


def test_a_request_goes_where_most_of_its_tokens_are():
    documents = [Wanted(key(1), 10, held_by("id1", tokens=300)), Wanted(key(2), 10, held_by("id2", tokens=500))]
    ranked = rank(documents, replicas(3))
    assert [each.candidate.id for each in ranked] == ["id2", "id1", "id0"]
    assert [each.held_tokens for each in ranked] == [500, 300, 0]
    # What a claim says counts, not the estimate.
    documents = [Wanted(key(1), 9999, held_by("id1", tokens=1)), Wanted(key(2), 1, held_by("id2", tokens=100))]
    assert first(documents, replicas(3)) == "id2"


def test_a_faster_tier_is_preferred():
    slow, fast = held_by("id0", tier=Tier.DISK), held_by("id1", tier=Tier.HOST)
    assert first([Wanted(key(1), 10, slow + fast)], replicas(3)) == "id1"
    assert first([Wanted(key(1), 10, slow)], replicas(3)) == "id0"


def test_a_hot_document_gets_another_replica_when_its_holder_has_too_much_to_do():
    assert first([], replicas(3, [2, 0, 1])) == "id1"
    documents = [Wanted(key(1), 10, held_by("id0", tokens=3 * LOAD_TOKENS))]
    assert first(documents, replicas(2, [2])) == "id0"
    assert first(documents, replicas(2, [4])) == "id1"


def test_claims_of_replicas_that_are_gone_count_for_nothing():
    documents = [Wanted(key(1), 10, held_by("gone"))]
    assert rank(documents, replicas(2)) == rank([Wanted(key(1), 10)], replicas(2))
    assert rank(documents, []) == []


def test_cold_requests_with_documents_in_common_meet():
    candidates = replicas(4)
    together = [Wanted(key(i), 100) for i in range(8)]
    homes = Counter(first([each], candidates) for each in together)
    assert first(together, candidates) == homes.most_common(1)[0][0]
    large = Wanted(key(99), 5000)
    assert first([*together, large], candidates) == first([large], candidates)


def test_only_who_claims_an_id_can_serve_it():
    by_id = Wanted(key(1), 0, held_by("id1", tokens=1), is_required=True)
    by_text = Wanted(key(2), 10, held_by("id0", tokens=100_000))
    assert first([by_id, by_text], replicas(2, [0, 50])) == "id1"


def test_storage_is_as_near_to_all_that_share_it():
    shared = [replace(each, storages=("ab",)) for each in replicas(3)[:2]] + replicas(3)[2:]
    wanted = [Wanted(key(1), 1000, held_by("ab", tier=Tier.DISK))]
    ranked = rank(wanted, shared)
    assert {each.candidate.id for each in ranked[:2]} == {"id0", "id1"}
    assert [each.held_tokens for each in ranked] == [1000, 1000, 0]
    wanted = [Wanted(key(1), 1000, [*held_by("id1"), *held_by("ab", tier=Tier.DISK)])]
    assert first(wanted, shared) == "id1"
    assert first([replace(wanted[0], claims=wanted[0].claims[::-1])], shared) == "id1"
    by_id = Wanted(key(1), 0, held_by("ab", tokens=1, tier=Tier.DISK), is_required=True)
    assert first([by_id], [replace(shared[0], load=50), shared[2]]) == "id0"


def test_homes_are_spread_evenly_and_few_move_when_a_replica_goes():
    candidates = replicas(8)
    homes = {i: first([Wanted(key(i), 1)], candidates) for i in range(4000)}
    counts = Counter(homes.values())
    assert max(counts.values()) < 1.25 * 4000 / 8
    left = [each for each in candidates if each.id != "id3"]
    moved = [i for i in homes if first([Wanted(key(i), 1)], left) != homes[i]]
    assert all(homes[i] == "id3" for i in moved)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.data())
def test_the_order_of_documents_and_candidates_does_not_matter(data):
    candidates = replicas(data.draw(st.integers(1, 6)), data.draw(st.lists(st.integers(0, 5), max_size=6)))
    ids = st.sampled_from([each.id for each in candidates])
    claims = st.lists(ids, unique=True).map(lambda chosen: held_by(*chosen, tokens=64))
    documents = [Wanted(key(i), 50, data.draw(claims)) for i in range(data.draw(st.integers(0, 5)))]
    ranked = rank(documents, candidates)
    assert {each.candidate for each in ranked} == set(candidates)
    assert rank(data.draw(st.permutations(documents)), data.draw(st.permutations(candidates))) == ranked
