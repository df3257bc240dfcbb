# SPDX-License-Identifier: Apache-2.0
"""Chunk attention on a CPU, compiled by Numba: float32 arithmetic over float32 or bfloat16 keys and values.

For each KV head the pieces of a step are taken one after another, tile by tile, with a running maximum, sum and output
for each row (online softmax, https://arxiv.org/abs/1805.02867). A tile is copied once, as float32, for all rows that
attend to it.

The work is divided into shares, one for each thread: so many KV heads, or only some pieces of a head. What several
shares have of one head is merged afterwards by log-sum-exp (flash decoding).
"""

from typing import Any

import numpy as np
from numba import njit
from numba.extending import overload
from numpy.typing import NDArray

from kernels.attention.plan import POOL
from kernels.attention.softmax import STRICT, soften
from kernels.attention.vectors import ROWS, product
from kernels.packed import PackedMemory, widen_keys, widen_values

Array = NDArray[Any]
Strides = tuple[int, ...]

TILE_TOKENS = 128
"""Keys of one tile."""
TILE_ROWS = 192
"""Rows, each one query head of one token, that share a tile. Rows and tile fit into 1 MiB of cache."""
DIVIDED_ROWS = 2048
"""With more rows, shares are whole heads: parts of heads would take too much memory."""
_COPY_ROWS = 12
"""Copying a tile takes as long as about so many rows of it."""

_F = np.float32


@njit(cache=True, nogil=True, error_model="numpy", fastmath=STRICT)  # type: ignore[untyped-decorator]
def _turn(query: Array, turned: Array, cos: Array, sin: Array, is_neox: bool, factor: float) -> None:
    """Rotates ``query`` [D] by minus the angles, times ``factor``, into ``turned`` [D]."""
    pairs = len(cos)
    for pair in range(pairs):
        one, other = (pair, pair + pairs) if is_neox else (2 * pair, 2 * pair + 1)
        x, y = query[one], query[other]
        turned[one] = (x * cos[pair] + y * sin[pair]) * factor
        turned[other] = (y * cos[pair] - x * sin[pair]) * factor
    for i in range(2 * pairs, len(query)):
        turned[i] = query[i] * factor


@njit(cache=True, nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def _widen(bits: Array, out: Array, shift: int) -> None:
    """Writes float32 bits: those of ``bits`` (uint32, ``shift`` 0), or of bfloat16 (uint16, ``shift`` 16)."""
    for i in range(len(bits)):
        out[i] = np.uint32(bits[i]) << np.uint32(shift)


@njit(cache=True, nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def _gather_strided(memory: Any, head: int, run: Any, at: int, tile: Any, shift: int) -> None:
    key_page, key_head, key_dim, value_page, value_head, size = memory.strides
    page, offset, length = run
    first = page * key_page + head * key_head + offset
    for dim in range(tile[0].shape[0]):
        start = first + dim * key_dim
        _widen(memory.keys[start : start + length], tile[0][dim, at : at + length], shift)
    start = page * value_page + head * value_head + offset * size
    _widen(memory.values[start : start + length * size], tile[1][at * size : (at + length) * size], shift)


@njit(cache=True, nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def _gather_packed(memory: Any, head: int, run: Any, at: int, tile: Any, shift: int) -> None:
    widen_keys(memory, head, run, at, tile[0])
    widen_values(memory, head, run, at, tile[1], tile[0].shape[0])


def _gather(memory: Any, head: Any, run: Any, at: Any, tile: Any, shift: Any) -> Any:
    """Copies a run's keys and values to column and row ``at`` of a tile; compiled code has the overload below."""


@overload(_gather)  # type: ignore[untyped-decorator]
def _gather_in_numba(memory: Any, head: Any, run: Any, at: Any, tile: Any, shift: Any) -> Any:
    gather = _gather_packed if memory.instance_class is PackedMemory else _gather_strided

    def of_memory(memory: Any, head: Any, run: Any, at: Any, tile: Any, shift: Any) -> Any:
        gather(memory, head, run, at, tile, shift)

    return of_memory


@njit(cache=True, nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def _fill_tile(memory: Any, runs: Array, place: Any, end: int, head: int, tile: Any, shift: int) -> Any:
    """Fills a tile from ``place``, a run and a number of its tokens, on; returns the place behind, and the length."""
    run, skipped = place
    length = 0
    while run < end and length < TILE_TOKENS:
        page, offset, count = runs[run]
        taken = min(count - skipped, TILE_TOKENS - length)
        _gather(memory, head, (page, offset + skipped, taken), length, tile, shift)
        length += taken
        skipped += taken
        if skipped == count:
            run, skipped = run + 1, 0
    return (run, skipped), length


@njit(cache=True, nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def _num_tokens(runs: Array, first: int, end: int) -> int:
    total = 0
    for run in range(first, end):
        total += runs[run, 2]
    return total


@njit(cache=True, nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def _head_cost(pieces: Array, runs: Array, group: int) -> int:
    """The cost of one head: that of its units, each some rows of a piece."""
    total = 0
    for number in range(len(pieces)):
        _, first_run, end_run, first_user, end_user = pieces[number]
        num_rows = (end_user - first_user) * group
        num_units = (num_rows + TILE_ROWS - 1) // TILE_ROWS
        total += _num_tokens(runs, first_run, end_run) * (num_rows + num_units * _COPY_ROWS)
    return total


@njit(cache=True, nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def attend(
    query: Array,
    out: Array,
    pool: Any,
    blocks: Any,
    shift: int,
    pieces: Array,
    runs: Array,
    users: Array,
    angles: Any,
    is_neox: bool,
    scale: float,
    num_kv_heads: int,
    share: Any,
    parts: Any,
) -> None:
    """Computes one share; both ``query`` and ``out`` are float32 ``[tokens, heads, D]``.

    ``pool`` and ``blocks`` are the bits of K and V and their strides, ``shift`` makes them float32's; ``blocks`` may be
    a :class:`kernels.packed.PackedMemory`. ``pieces`` to ``users`` are an
    :class:`kernels.attention.plan.AttentionPlan`'s; ``angles`` are cos and sin of its deltas.
    ``share``: its number, and the number of all. A whole head is written to ``out``, a head of which the share has a
    part to ``parts`` (:func:`kernels.attention.softmax.merge`), arrays of two slots for each share: the KV head
    ``[slots]``, maximum and sum ``[slots, rows, 2]``, and output ``[slots, rows, D]``.
    """
    num_tokens, num_heads, size = query.shape
    group = num_heads // num_kv_heads
    state, result = np.empty((num_tokens * group, 2), np.float32), np.empty((num_tokens * group, size), np.float32)
    q, o = np.empty((TILE_ROWS, size), np.float32), np.empty((TILE_ROWS, size), np.float32)
    seen, tile_state = np.empty(TILE_ROWS, np.int64), np.empty((TILE_ROWS, 2), np.float32)
    scores, scratch = np.empty((TILE_ROWS, TILE_TOKENS), np.float32), np.empty((2, TILE_TOKENS), np.float32)
    keys, values = np.empty((size, TILE_TOKENS), np.float32), np.empty((TILE_TOKENS, size), np.float32)
    tile = keys.view(np.uint32), values.reshape(-1).view(np.uint32)
    cost, (own, shares) = _head_cost(pieces, runs, group), share
    low, high = num_kv_heads * cost * own // shares, num_kv_heads * cost * (own + 1) // shares
    if len(state) > DIVIDED_ROWS:
        low, high = num_kv_heads * own // shares * cost, num_kv_heads * (own + 1) // shares * cost
    slot = 2 * own
    for head in range(num_kv_heads):
        at = head * cost
        if at + cost <= low or at >= high:
            continue
        is_whole = at >= low and at + cost <= high
        state[:, 0], state[:, 1], result[:] = -np.inf, 0, 0
        for number in range(len(pieces)):
            source, first_run, end_run, first_user, end_user = pieces[number]
            num_rows, num_keys = (end_user - first_user) * group, _num_tokens(runs, first_run, end_run)
            for start in range(0, num_rows, TILE_ROWS):
                rows = min(TILE_ROWS, num_rows - start)
                is_own = low <= at < high
                at += num_keys * (rows + _COPY_ROWS)
                if not is_own:
                    continue
                padded = (rows + ROWS - 1) // ROWS * ROWS
                q[rows:padded], o[rows:padded] = 0, 0
                for r in range(rows):
                    token, turn, seen[r] = users[first_user + (start + r) // group]
                    member, factor = (start + r) % group, _F(scale)
                    _turn(query[token, head * group + member], q[r], angles[0][turn], angles[1][turn], is_neox, factor)
                    o[r], tile_state[r] = result[token * group + member], state[token * group + member]
                place = (first_run, 0)
                while place[0] < end_run:
                    if source == POOL:
                        place, length = _fill_tile(pool, runs, place, end_run, head, tile, shift)
                    else:
                        place, length = _fill_tile(blocks, runs, place, end_run, head, tile, shift)
                    product(scores, q, keys, padded, size, length, False)
                    soften(scores, rows, length, seen, tile_state, o, scratch)
                    product(o, scores, values, padded, length, size, True)
                    seen[:rows] -= length
                for r in range(rows):
                    row = users[first_user + (start + r) // group, 0] * group + (start + r) % group
                    result[row], state[row] = o[r], tile_state[r]
        if is_whole:
            for row in range(num_tokens * group):
                out[row // group, head * group + row % group] = result[row] / state[row, 1]
        else:
            parts[0][slot] = head
            parts[1][slot], parts[2][slot] = state, result
            slot += 1
