# SPDX-License-Identifier: Apache-2.0
"""Policies against plain formulas, and shares against one softmax over all tokens."""

import pytest
import torch

from kernels.selection import POLICIES, block_shares, represent_blocks, shares

TOKENS, HEADS, KV_HEADS, SIZE = 7, 6, 2, 16
LENGTHS = (40, 3, 65)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_shares_are_those_of_one_softmax_over_all_tokens(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    query = torch.randn(TOKENS, HEADS, SIZE).to(dtype)
    segments = [torch.randn(length, KV_HEADS, SIZE).to(dtype) for length in LENGTHS]
    policy = POLICIES["attention"]
    found = shares(policy, [query] * len(segments), [policy.represent(keys) for keys in segments], 0.3)
    keys = torch.cat(segments).float().repeat_interleave(HEADS // KV_HEADS, dim=1)
    weights = (torch.einsum("qhd,khd->hqk", query.float(), keys) * 0.3).softmax(-1)
    expected = torch.stack([part.sum() for part in weights.split(LENGTHS, dim=-1)]) / HEADS
    torch.testing.assert_close(found, expected)
    assert float(found.sum()) == pytest.approx(TOKENS)


def test_each_segment_has_queries_of_its_own() -> None:
    torch.manual_seed(0)
    query, keys = torch.randn(TOKENS, HEADS, SIZE), torch.randn(20, KV_HEADS, SIZE)
    policy = POLICIES["attention"]
    kept = policy.represent(keys)
    alike = shares(policy, [query, query], [kept, kept], 1.0)
    apart = shares(policy, [query, torch.zeros_like(query)], [kept, kept], 1.0)
    assert float(alike[0]) == pytest.approx(float(alike[1]))
    assert float(apart[0]) > float(apart[1])


def test_channels_are_the_largest_of_each_head() -> None:
    keys = torch.randn(30, KV_HEADS, SIZE) * 0.1
    keys[:, 0, [1, 5, 8, 15]] += 3
    keys[:, 1, [0, 2, 3, 4]] -= 3
    kept = POLICIES["channels"].represent(keys)
    assert [sorted(each.tolist()) for each in kept["channels"]] == [[1, 5, 8, 15], [0, 2, 3, 4]]
    query = torch.randn(KV_HEADS, TOKENS, SIZE)
    masked = torch.zeros_like(keys)
    masked[:, 0, [1, 5, 8, 15]] = keys[:, 0, [1, 5, 8, 15]]
    masked[:, 1, [0, 2, 3, 4]] = keys[:, 1, [0, 2, 3, 4]]
    expected = torch.einsum("hqd,khd->hqk", query, masked)
    torch.testing.assert_close(POLICIES["channels"].logits(query, kept), expected)


@pytest.mark.parametrize(("name", "share"), [("attention", 1), ("channels", 0.27)])
def test_what_is_kept_is_new_memory_of_a_certain_size(name: str, share: float) -> None:
    keys = torch.randn(320, KV_HEADS, SIZE)
    kept = POLICIES[name].represent(keys)
    assert all(tensor.untyped_storage().data_ptr() != keys.untyped_storage().data_ptr() for tensor in kept.values())
    assert sum(tensor.nbytes for tensor in kept.values()) <= share * keys.nbytes


@pytest.mark.parametrize("name", POLICIES)
def test_blocks_of_heads_are_represented_and_scored_as_segments_of_one_head(name: str) -> None:
    torch.manual_seed(0)
    policy, keys, query = POLICIES[name], torch.randn(5, 64, KV_HEADS, SIZE), torch.randn(HEADS, SIZE)
    found = block_shares(policy, query, represent_blocks(policy, keys), 0.3)
    for head in range(KV_HEADS):
        segments = [policy.represent(block[:, head : head + 1]) for block in keys]
        queries = [query[None, head * 3 : head * 3 + 3]] * len(segments)
        torch.testing.assert_close(found[head], shares(policy, queries, segments, 0.3))
