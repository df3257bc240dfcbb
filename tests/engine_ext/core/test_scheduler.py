# SPDX-License-Identifier: Apache-2.0
"""Transfers of steps: tables of blocks, blocks dropped behind windows, and prefills in several steps."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec, SlidingWindowSpec

from engine_ext.core.layers import BlockTable, block_tables
from engine_ext.core.scheduler import SchedulerHalf
from engine_ext.wire.plan import BlockTransfer, Span, TransferPlan

BLOCK, WINDOW = 4, 6
TABLES = [BlockTable(frozenset({"all"}), BLOCK, None), BlockTable(frozenset({"windowed"}), BLOCK, WINDOW)]
SYSTEM, CHUNK = Span(0, 5, 0, 1, (0, 1)), Span(5, 9, 0, 2, (2, 3, 4))


def half_with(plan: TransferPlan, num_tokens: int, tables: list[BlockTable]) -> tuple[SchedulerHalf, Any]:
    half = SchedulerHalf("sha256", BLOCK, tables)
    absent = dict.fromkeys(("lora_request", "cache_salt", "prompt_embeds"))
    flags = {"num_preemptions": 0, "skip_reading_prefix_cache": False, "mm_features": [], **absent}
    tokens = {"num_prompt_tokens": num_tokens, "num_tokens": num_tokens, "all_token_ids": list(range(num_tokens))}
    params = plan.to_params()
    request: Any = SimpleNamespace(
        request_id="r", kv_transfer_params=params, block_hashes=[b"found"], **tokens, **flags
    )
    request.update_block_hashes = lambda: request.block_hashes.extend(request._block_hasher(request))
    half.add_request(request)
    return half, request


def step(computed: int, scheduled: int, new: Any = None, cached: Any = None, *, resumed: bool = False) -> Any:
    """A step of the request: ``new`` has its tables when it starts, ``cached`` the blocks that are added later."""
    return SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id="r", block_ids=new, num_computed_tokens=computed)] if new else [],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[] if new else ["r"],
            new_block_ids=[cached],
            num_computed_tokens=[computed],
            resumed_req_ids={"r"} if resumed else set(),
        ),
        num_scheduled_tokens={"r": scheduled},
    )


def test_a_load_leaves_out_tokens_whose_blocks_were_dropped() -> None:
    half, request = half_with(TransferPlan(loads=(SYSTEM, CHUNK)), 20, TABLES)
    assert half.num_matched_tokens(request, 0) == 14
    tables = ([3, 4, 5, 6], [0, 0, 7, 8])
    half.blocks_allocated(request, SimpleNamespace(get_block_ids=lambda: tables), 14)  # type: ignore[arg-type]
    loads = half.build_step(step(0, 0, cached=None)).loads
    assert loads == [
        BlockTransfer("r", (3, 4, 5, 6), 0, (SYSTEM, CHUNK), 0),
        BlockTransfer("r", (0, 0, 7, 8), 2 * BLOCK, (SYSTEM, CHUNK), 1),
    ]


@pytest.mark.parametrize("tables", [[], TABLES])
def test_each_step_saves_what_it_computes(tables: list[BlockTable]) -> None:
    """The second step's table has lost its first block."""
    half, request = half_with(TransferPlan(saves=(SYSTEM, CHUNK)), 14, tables)
    number = max(1, len(tables))
    first = half.build_step(step(0, 8, new=[[1, 2]] * number)).saves
    assert [(save.table, save.first_token, save.end_token, save.spans) for save in first] == [
        (table, 0, 8, (SYSTEM, CHUNK)) for table in range(number)
    ]
    second = half.build_step(step(8, 6, cached=[[3, 4]] * number)).saves
    assert [(save.block_ids, save.first_token, save.end_token, save.spans) for save in second] == [
        ((1, 2, 3, 4), 8, 14, (CHUNK,))
    ] * number
    assert not half.build_step(step(14, 1, cached=None)).saves
    assert half.finish_request(request) == {"saved": True}


@pytest.mark.parametrize("is_loaded_again", [False, True])
def test_what_was_computed_behind_a_refused_load_is_not_saved(is_loaded_again: bool) -> None:
    """The refusal is read after the step in which vLLM preempts the request."""
    half, request = half_with(TransferPlan(loads=(SYSTEM,), saves=(CHUNK,)), 14, [])
    half.build_step(step(5, 9, new=[[1, 2, 3, 4]]))
    half.loads_refused()
    if is_loaded_again:
        assert half.build_step(step(5, 9, cached=[[5, 6, 7, 8]], resumed=True)).saves
    assert half.finish_request(request) == ({"saved": True} if is_loaded_again else None)


def test_saved_tokens_are_saved_once_and_those_without_a_block_never() -> None:
    half, request = half_with(TransferPlan(saves=(CHUNK,)), 14, TABLES)
    half.build_step(step(0, 8, new=[[1, 2], [3, 4]]))
    assert not half.build_step(step(0, 8, cached=[[1, 2], [3, 4]], resumed=True)).saves
    (save, of_windows) = half.build_step(step(8, 6, cached=[[5, 6], [7, 8]])).saves
    assert (save.first_token, of_windows.block_ids) == (8, (3, 4, 7, 8))
    assert half.finish_request(request) == {"saved": True}
    # Found in the engine's prefix cache, say.
    half, request = half_with(TransferPlan(saves=(CHUNK,)), 14, TABLES)
    assert not half.build_step(step(12, 2, new=[[1, 2, 3, 4], [0, 0, 5, 6]])).saves
    assert half.finish_request(request) is None


@pytest.mark.parametrize(("num_tokens", "finds"), [(WINDOW, True), (14, False)])
def test_fills_find_no_tokens_that_have_lost_their_blocks(num_tokens: int, finds: bool) -> None:
    plan = TransferPlan(saves=(Span(0, num_tokens, 0, 1, (0, 1, 2, 3)),))
    half, request = half_with(plan, num_tokens, TABLES)
    assert (request.block_hashes[0] == b"found") is finds
    first, request.block_hashes, request.kv_transfer_params = request.block_hashes, [b"found"], plan.to_params()
    half.add_request(request)
    assert (request.block_hashes == first) is finds


def test_tables_of_groups() -> None:
    shape: Any = {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": torch.float32}
    full = KVCacheGroupSpec(["a", "b"], FullAttentionSpec(**shape))
    windowed = KVCacheGroupSpec(["c"], SlidingWindowSpec(**shape, sliding_window=48))
    assert block_tables([full]) == []
    assert block_tables([windowed]) == [BlockTable(frozenset("c"), 16, 48)]
    assert block_tables([full, windowed]) == [BlockTable(frozenset("ab"), 16, None), BlockTable(frozenset("c"), 16, 48)]
