# SPDX-License-Identifier: Apache-2.0
"""Hashes of composed blocks with vLLM's own requests and hashing; shifted blocks under any vLLM actions."""

import random
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from engine_ext.core.block_hashes import BlockComposer, ShiftLedger
from engine_ext.wire.plan import Composition

BLOCK, ALGORITHM = 4, "sha256"
SYSTEM, A, B, QUESTION = list(range(8)), list(range(100, 108)), list(range(200, 204)), [300, 301, 302, 303, 304]


@pytest.fixture(autouse=True, scope="module")
def _root():
    init_none_hash(get_hash_fn_by_name(ALGORITHM))


def plain(token_ids, salt=None):
    """An ordinary request, created as by vLLM."""
    hasher = get_request_block_hasher(BLOCK, get_hash_fn_by_name(ALGORITHM))
    return Request(
        request_id="r",
        prompt_token_ids=list(token_ids),
        sampling_params=SamplingParams(max_tokens=9),
        pooling_params=None,
        cache_salt=salt,
        block_hasher=hasher,
    )


def composed(chunks, question=QUESTION, salt=None, shift=8, layout_salt="layout", system=SYSTEM):
    tokens = [*system, *(token for chunk in chunks for token in chunk), *question]
    request = plain(tokens, layout_salt)
    BlockComposer(ALGORITHM, BLOCK).compose(request, Composition((len(system), *map(len, chunks)), shift, salt))
    return request


@pytest.mark.parametrize("system", [SYSTEM, []], ids=["system", "no system"])
@pytest.mark.parametrize("salt", [None, "tenant"])
def test_chunks_have_the_hashes_of_their_fills_wherever_they_stand(salt, system):
    fills = {id(chunk): plain(system + chunk, salt).block_hashes for chunk in (A, B)}
    for chunks in ([A], [A, B], [B, A], [A, B, A]):
        hashes, own = composed(chunks, salt=salt, system=system).block_hashes, len(system) // BLOCK
        expected = [*fills[id(A)][:own], *(each for chunk in chunks for each in fills[id(chunk)][own:])]
        assert hashes[: len(expected)] == expected
        assert len(hashes) == len(expected) + 1  # one full block of the question


def test_another_salt_has_other_hashes():
    assert not set(composed([A, B], salt="a").block_hashes) & set(composed([A, B], salt="b").block_hashes)


def question_block(**options):
    return composed(**{"chunks": [A, B], **options}).block_hashes[-1]


def test_questions_are_found_behind_the_same_composition_alone():
    same = question_block()
    assert question_block() == same
    others = [
        question_block(chunks=[B, A]),
        question_block(chunks=[A]),
        question_block(shift=4),
        question_block(layout_salt="other"),
        question_block(chunks=[A + B]),
        plain([*SYSTEM, *A, *B, *QUESTION]).block_hashes[-1],
        plain([*SYSTEM, *B, *QUESTION]).block_hashes[-1],
    ]
    assert len({same, *others}) == len(others) + 1


@pytest.mark.parametrize("length", range(1, 10))
def test_answers_go_on_as_if_they_had_been_the_question(length):
    """Also if the question fills no block."""
    rest = [400 + i for i in range(13)]
    request = composed([A, B], question=rest[:length])
    request.append_output_token_ids(rest[length:])
    assert request.block_hashes == composed([A, B], question=rest).block_hashes


LENGTHS = (2 * BLOCK, BLOCK)


class Engine:
    """Allocates blocks like vLLM's scheduler, with a worker's shift table."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.ledger = ShiftLedger(BLOCK)
        self.free = list(range(1, 20))
        self.blocks = {}
        self.compositions = {}
        self.table = {}

    def step(self, new=(), grown=(), resumed=()):
        cached = SimpleNamespace(req_ids=[], new_block_ids=[], resumed_req_ids=set(resumed))
        for request in (*grown, *resumed):
            taken = self.take(1 if request in grown else 5)
            self.blocks[request] = [*(self.blocks[request] if request in grown else ()), *taken]
            cached.req_ids.append(request)
            cached.new_block_ids.append((taken,) if taken else None)
        for request in new:
            self.blocks[request] = self.take(self.random.randint(3, 5))
        made = [SimpleNamespace(req_id=request, block_ids=(list(self.blocks[request]),)) for request in new]
        output = SimpleNamespace(scheduled_new_reqs=made, scheduled_cached_reqs=cached)
        self.table.update(self.ledger.changes(output))

    def take(self, number):
        self.random.shuffle(self.free)
        taken, self.free = self.free[:number], self.free[number:]
        return taken

    def check(self):
        for request, blocks in self.blocks.items():
            shift = self.compositions.get(request, 0)
            expected = [shift if i >= sum(LENGTHS) // BLOCK else 0 for i in range(len(blocks))]
            assert [self.table.get(block, 0) for block in blocks] == expected


@given(st.integers(0, 2**32), st.lists(st.sampled_from("nogpre"), max_size=40))
def test_every_block_has_the_shift_of_who_holds_it(seed, events):
    """Actions on requests: n: new composed, o: new ordinary, g: grow, p: preempt, r: resume, e: end."""
    engine, preempted, count = Engine(seed), [], 0
    for event in events:
        if event in "no" and len(engine.free) >= 5:
            count += 1
            if event == "n":
                engine.compositions[count] = shift = engine.random.randint(0, 3) * BLOCK
                engine.ledger.add(count, Composition(LENGTHS, shift, None))
            engine.step(new=[count])
        elif event == "r" and preempted and len(engine.free) >= 5:
            engine.step(resumed=[preempted.pop()])
        elif engine.blocks and event in "gpe":
            request = engine.random.choice(sorted(engine.blocks))
            if event == "g":
                engine.step(grown=[request])
                continue
            engine.free += engine.blocks.pop(request)
            if event == "p":
                preempted.append(request)
            else:
                engine.ledger.forget(request)
                engine.compositions.pop(request, None)
        engine.check()
