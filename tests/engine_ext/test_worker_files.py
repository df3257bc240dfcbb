# SPDX-License-Identifier: Apache-2.0
"""Segments of a worker's pool, read and written as wholes."""

from dataclasses import replace
from threading import Thread

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine_ext.core.layers import BlockTable
from engine_ext.core.pages import WrongPagesError, fill_pages
from engine_ext.wire.plan import BlockTransfer, LoadRefused, Span
from kernels.dispatch import copier_for
from kernels.paged import pools_of
from tests.support.workers import HEADS, NAMES, SIZE, is_equal, make_half, segment

PAGES, PAGE_TOKENS = 12, 4


def worker(order=(0, 1, 2, 3)):
    """A worker with the memory order ``order`` of blocks and pages."""
    view = torch.zeros(2, 16, HEADS, SIZE).permute(*order).contiguous().permute(*torch.tensor(order).argsort())
    return make_half([view.clone() for _ in NAMES], PAGES, PAGE_TOKENS)


@given(st.integers(1, 30), st.randoms(), st.sampled_from([(0, 1, 2, 3), (0, 2, 1, 3)]))
def test_what_is_written_to_any_pages_is_read_again_and_nothing_else_changes(num_tokens, rng, order):
    half, count = worker(order), -(-num_tokens // PAGE_TOKENS)
    pages = sorted(rng.sample(range(PAGES), count))
    others = [page for page in range(PAGES) if page not in pages]
    half.write(pages, 7, num_tokens, segment(num_tokens))
    assert is_equal(read(half, pages, 7, num_tokens), segment(num_tokens))
    for pool in pools_of(half.copier.layers).values():
        assert not pool[others].any()
        assert not pool[pages].flatten(0, 1)[num_tokens:].any()


def test_pages_of_another_tag_or_whose_saves_have_not_ended_are_not_read():
    half = worker()
    half.write([3, 4], 7, 8, segment(8))
    with pytest.raises(WrongPagesError, match="tag 8"):
        read(half, [3, 4], 8, 8)
    half.write([4], 9, 4, segment(4))
    with pytest.raises(WrongPagesError):
        read(half, [3, 4], 7, 8)
    half = worker()
    half.copier.layers[1].value_blocks[0, torch.arange(8)] = segment(8, seed=1)["1.value"]
    half.save([replace(transfer(7), end_token=5)])
    with pytest.raises(WrongPagesError):
        read(half, [3, 4], 7, 8)
    half.save([replace(transfer(7), first_token=5, end_token=8)])
    assert torch.equal(read(half, [3, 4], 7, 8)["1.value"], segment(8, seed=1)["1.value"])


@pytest.mark.parametrize(
    "change",
    [
        lambda found: found.pop("0.key"),
        lambda found: found.update(more=torch.zeros(8, HEADS, SIZE)),
        lambda found: found.update({"1.key": torch.zeros(7, HEADS, SIZE)}),
        lambda found: found.update({"1.key": torch.zeros(8, HEADS + 1, SIZE)}),
        lambda found: found.update({"1.key": torch.zeros(8, HEADS, SIZE, dtype=torch.float16)}),
    ],
)
def test_what_is_no_kv_of_this_pool_is_refused_and_nothing_is_written(change):
    half, found = worker(), segment(8)
    half.write([3, 4], 7, 8, segment(8, seed=1))
    change(found)
    with pytest.raises(WrongPagesError):
        half.write([3, 4], 8, 8, found)
    assert is_equal(read(half, [3, 4], 7, 8), segment(8, seed=1))


def read(half, pages, tag, num_tokens):
    tensors = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in half.forms(num_tokens).items()}
    half.read(pages, tag, tensors)
    return tensors


def transfer(tag, pages=(3, 4)):
    """Plan for 8 tokens in the engine's first block."""
    return BlockTransfer("r", (0,), 0, (Span(0, 8, 0, tag, pages),))


def meanwhile(target, monkeypatch, name, move):
    """Runs ``move`` in another thread at the first call of ``target``'s method ``name``."""
    method, threads = getattr(target, name), []

    def called(*arguments):
        if not threads:
            threads.append(Thread(target=move))
            threads[0].start()
            threads[0].join(0.3)
        return method(*arguments)

    monkeypatch.setattr(target, name, called)
    return threads


@pytest.mark.parametrize("end_token", [None, 5])
def test_a_late_save_to_pages_that_are_being_written_makes_them_nobodys(end_token, monkeypatch):
    """A whole one, or a part of one."""
    half, saved = worker(), []
    late = replace(transfer(7), end_token=end_token)

    def fill(*arguments):
        fill_pages(*arguments)
        if not saved:
            saved.append(Thread(target=half.save, args=([late],)))
            saved[0].start()
            saved[0].join()

    monkeypatch.setattr("engine_ext.core.worker.fill_pages", fill)
    with pytest.raises(WrongPagesError):
        half.write([3, 4], 8, 8, segment(8))
    for tag in (7, 8):
        with pytest.raises(WrongPagesError):
            read(half, [3, 4], tag, 8)


def test_pages_are_not_written_while_they_are_loaded(monkeypatch):
    half = worker()
    half.write([3, 4], 7, 8, segment(8, seed=1))
    threads = meanwhile(half.copier, monkeypatch, "load", lambda: half.write([3, 4], 8, 8, segment(8, seed=2)))
    half.load([transfer(7)])
    threads[0].join()
    assert half.refused_tags == set()
    assert torch.equal(half.copier.layers[1].value_blocks[0][:8], segment(8, seed=1)["1.value"])


def test_a_step_has_one_copy_and_a_refused_load_leaves_the_others(monkeypatch):
    half = worker()
    half.write([3, 4], 7, 8, segment(8, seed=1))
    half.write([5, 6], 8, 8, segment(8, seed=2))
    calls, load = [], half.copier.load
    monkeypatch.setattr(half.copier, "load", lambda *moved: (calls.append(moved), load(*moved)))
    others = [replace(transfer(8, (5, 6)), block_ids=(1,)), replace(transfer(9, (5, 6)), block_ids=(9,))]
    half.load([transfer(7), *others])
    assert len(calls) == 1
    assert half.take_refused_blocks() == {9}
    for block, seed in ((0, 1), (1, 2)):
        assert torch.equal(half.copier.layers[1].value_blocks[block][:8], segment(8, seed=seed)["1.value"])


def test_of_two_saves_to_a_page_in_one_step_the_later_one_stays(monkeypatch):
    half = worker()
    calls, save = [], half.copier.save
    monkeypatch.setattr(half.copier, "save", lambda *moved: (calls.append(moved), save(*moved)))
    for block in (0, 1):
        half.copier.layers[1].value_blocks[block, torch.arange(8)] = segment(8, seed=block + 1)["1.value"]
    half.save([transfer(7), replace(transfer(8), block_ids=(1,))])
    assert len(calls) == 2  # a copier's rows must not repeat
    assert torch.equal(read(half, [3, 4], 8, 8)["1.value"], segment(8, seed=2)["1.value"])
    half.save([transfer(7), replace(transfer(8, (5, 6)), block_ids=(1,))])
    assert len(calls) == 3


def test_layers_with_windows_have_blocks_of_their_own():
    half = worker()
    kinds = ("all", "windowed")
    half.tables = [BlockTable(frozenset({kind}), 16, None) for kind in kinds]
    half._copiers = {number: copier_for([layer]) for number, layer in enumerate(half.copier.layers)}
    half.write([3, 4], 7, 8, segment(8, seed=1))
    everything, windowed = transfer(7), replace(transfer(7), block_ids=(1,), first_token=6, table=1)
    half.load([everything, windowed])
    blocks = [layer.value_blocks for layer in half.copier.layers]
    assert torch.equal(blocks[0][0][:8], segment(8, seed=1)["0.value"])
    assert torch.equal(blocks[1][1][6:8], segment(8, seed=1)["1.value"][6:])
    assert not blocks[1][1][:6].any()
    assert half.take_received() == ({"r"}, set())
    half.save([transfer(9, (5, 6)), replace(transfer(9, (5, 6)), block_ids=(1,), table=1)])
    assert torch.equal(read(half, [5, 6], 9, 8)["1.value"][6:], segment(8, seed=1)["1.value"][6:])
    half.load([transfer(8), replace(transfer(8), table=1)])
    assert (half.take_received(), half.take_refused_blocks()) == (({"r"}, {"r"}), set())
    assert half.take_stats().data["worker_refused_loads"] == 1


def test_a_refused_load_is_told_once_and_the_log_says_why(caplog):
    half = worker()
    half.write([3, 4], 7, 8, segment(8))
    half.save([replace(transfer(8, (6, 7)), end_token=3)])
    half.load([transfer(9, (3, 5)), transfer(8, (6, 7))])
    said = [record.getMessage() for record in caplog.records if record.name == "engine_ext.core.worker"]
    unfinished = (f"page {page} has an unfinished fill instead of tag 8" for page in (6, 7))
    assert (half.take_refused_blocks(), half.take_refusal()) == ({0}, LoadRefused())
    assert (half.take_refused_blocks(), half.take_refusal()) == (set(), None)
    assert said == [
        "a load is refused: page 3 has tag 7 instead of tag 9, page 5 has no tag instead of tag 9",
        f"a load is refused: {', '.join(unfinished)}",
    ]


@pytest.mark.parametrize("then", ["preempted", "another"])
def test_what_is_computed_behind_a_refused_load_is_nobodys(then):
    """vLLM runs a request for one more step before it reads the refusal, and may preempt it then."""
    half, computed = worker(), transfer(8, (5, 6))
    half.load([transfer(7)])
    for _ in range(2):
        half.save([computed])
    with pytest.raises(WrongPagesError):
        read(half, [5, 6], 8, 8)
    if then == "preempted":
        half.write([3, 4], 7, 8, segment(8))
        half.load([transfer(7)])
    else:
        half.end({"r"})
    half.save([computed])
    read(half, [5, 6], 8, 8)


def test_the_engine_moves_other_pages_while_some_are_written(monkeypatch):
    half = worker()

    def fill(*arguments):
        assert not half._moving.locked()
        fill_pages(*arguments)

    monkeypatch.setattr("engine_ext.core.worker.fill_pages", fill)
    half.write([3, 4], 7, 8, segment(8))
    read(half, [3, 4], 7, 8)
