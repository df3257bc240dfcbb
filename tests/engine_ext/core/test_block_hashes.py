# SPDX-License-Identifier: Apache-2.0
"""Hashes of the blocks of requests over chunks, with vLLM's own requests, hashing and blocks."""

import pytest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from engine_ext.core.block_hashes import BlockComposer
from engine_ext.wire.plan import Composition

BLOCK, ALGORITHM = 4, "sha256"
SYSTEM, A, B, QUESTION = list(range(8)), list(range(100, 108)), list(range(200, 204)), [300, 301, 302, 303, 304]


@pytest.fixture(autouse=True, scope="module")
def _root():
    init_none_hash(get_hash_fn_by_name(ALGORITHM))


def plain(token_ids, salt=None):
    """An ordinary request, created as by vLLM."""
    hasher = get_request_block_hasher(BLOCK, get_hash_fn_by_name(ALGORITHM))
    asked = {"prompt_token_ids": list(token_ids), "sampling_params": SamplingParams(max_tokens=9)}
    return Request(request_id="r", **asked, pooling_params=None, cache_salt=salt, block_hasher=hasher)


def composed(chunks, question=QUESTION, salt=None, layout_salt="layout", system=SYSTEM):
    tokens = [*system, *(token for chunk in chunks for token in chunk), *question]
    request = plain(tokens, layout_salt)
    BlockComposer(ALGORITHM, BLOCK).compose(request, Composition((len(system), *map(len, chunks)), salt))
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


def test_questions_are_found_behind_the_same_composition_and_salt_alone():
    assert not set(composed([A, B], salt="a").block_hashes) & set(composed([A, B], salt="b").block_hashes)
    same = question_block()
    assert question_block() == same
    others = [
        question_block(chunks=[B, A]),
        question_block(chunks=[A]),
        question_block(layout_salt="other"),
        question_block(chunks=[A + B]),
        plain([*SYSTEM, *A, *B, *QUESTION]).block_hashes[-1],
        plain([*SYSTEM, *B, *QUESTION]).block_hashes[-1],
    ]
    assert len({same, *others}) == len(others) + 1


def question_block(**options):
    return composed(**{"chunks": [A, B], **options}).block_hashes[-1]


@pytest.mark.parametrize("length", range(1, 10))
def test_answers_go_on_as_if_they_had_been_the_question(length):
    """Also if the question fills no block."""
    rest = [400 + i for i in range(13)]
    request = composed([A, B], question=rest[:length])
    request.append_output_token_ids(rest[length:])
    assert request.block_hashes == composed([A, B], question=rest).block_hashes


def attending(context, question=QUESTION, salt="layout"):
    """A request over `context` in the chunk pool, and its engine's blocks."""
    pool = BlockPool(num_gpu_blocks=4, enable_caching=True, hash_block_size=BLOCK)
    request = plain([*context, *question], salt)
    BlockComposer(ALGORITHM, BLOCK).leave_out(request, len(context), pool)
    return request, pool


@pytest.mark.parametrize("length", range(1, 14))
def test_all_blocks_of_a_context_but_the_last_are_the_null_block(length):
    request, pool = attending(list(range(length)))
    absent = (length - 1) // BLOCK
    found = [pool.get_cached_block(each, [0]) for each in request.block_hashes]
    assert found == [[pool.null_block]] * absent + [None] * (len(found) - absent)
    assert len(request.block_hashes) == (length + len(QUESTION)) // BLOCK


def test_questions_are_found_behind_the_same_context_alone_also_after_a_reset():
    context = [*SYSTEM, *A, 7]
    hashes = attending(context)[0].block_hashes
    assert attending(context)[0].block_hashes == hashes
    others = [attending([*SYSTEM, *B, *B, 7])[0], attending(context, salt="other")[0], plain([*context, *QUESTION])]
    assert all(other.block_hashes[-1] != hashes[-1] for other in others)
    _, pool = attending(SYSTEM)
    pool.reset_prefix_cache()
    request = plain([*SYSTEM, *QUESTION])
    BlockComposer(ALGORITHM, BLOCK).leave_out(request, len(SYSTEM), pool)
    assert pool.get_cached_block(request.block_hashes[0], [0]) == [pool.null_block]


@pytest.mark.parametrize("salt", [None, "tenant"])
def test_a_request_in_full_attention_again_has_the_hashes_of_an_ordinary_one(salt):
    ordinary, request = plain([*SYSTEM, *A, *B, *QUESTION], salt), composed([A, B], salt=salt)
    BlockComposer(ALGORITHM, BLOCK).as_plain(request, salt)
    assert request.block_hashes == ordinary.block_hashes
    for each in (ordinary, request):
        each.append_output_token_ids([7, 8, 9, 10])
    assert request.block_hashes == ordinary.block_hashes
