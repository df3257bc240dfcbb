# SPDX-License-Identifier: Apache-2.0
"""Triton: attention of a step's queries to pieces of the pool and of the engine's blocks, in parts that are merged.

Each program computes one KV head of one unit (:class:`kernels.attention.plan.Units`): a range of keys, and the tokens
that attend to them, with a running maximum, sum and output for each row (online softmax). Its keys and values are read
once for all of its rows. What the units have of one token is merged afterwards by log-sum-exp (flash decoding).
"""

# Pointers and scalars have no static type in a kernel.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def _turned(
    query,
    turn,
    cos,
    sin,
    is_row,
    HEAD_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    PAIRS: tl.constexpr,
    IS_NEOX: tl.constexpr,
):
    """Heads `[ROWS, WIDTH]` at `query` `[ROWS]`, rotated by minus the angles of their `turn`; in float32."""
    dims = tl.arange(0, WIDTH)
    if IS_NEOX:
        is_first, pair, other = dims < PAIRS, dims % PAIRS, tl.where(dims < PAIRS, dims + PAIRS, dims - PAIRS)
    else:
        is_first, pair, other = dims % 2 == 0, dims // 2, dims ^ 1
    mask, is_turned = is_row[:, None] & (dims < HEAD_SIZE)[None, :], is_row[:, None] & (dims < 2 * PAIRS)[None, :]
    own = tl.load(query[:, None] + dims[None, :], mask=mask, other=0).to(tl.float32)
    partner = tl.load(query[:, None] + other[None, :], mask=is_turned, other=0).to(tl.float32)
    angle = turn[:, None] * PAIRS + pair[None, :]
    c = tl.load(cos + angle, mask=is_turned, other=1)
    s = tl.load(sin + angle, mask=is_turned, other=0)
    return own * c + partner * tl.where(is_first[None, :], s, -s)


# What differs between steps must not be compiled in: a request would wait for the compiler.
@triton.jit(
    do_not_specialize=["first_unit", "first_entry"],
    do_not_specialize_on_alignment=["places", "units", "entries", "cos", "sin"],
)
def attend_units(
    query,
    keys,
    values,
    strides,
    places,
    units,
    entries,
    cos,
    sin,
    parts,
    sums,
    scale,
    query_token,
    query_head,
    num_kv_heads,
    first_unit,
    first_entry,
    HEAD_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    PAIRS: tl.constexpr,
    IS_NEOX: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    PLACE_BITS: tl.constexpr,
    ALIGNED: tl.constexpr,
    ADJACENT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Computes units from `first_unit` on, a program for each and each KV head; heads are neighbours.

    `query` is `[tokens, heads, D]`. `keys` and `values` are the pool's first elements; `strides`, int64
    `[2 sources, 2 operands, 5]`, has each source's distance from them and its strides, in elements, all multiples of
    `ALIGNED` but those of dims, which are 1 if `ADJACENT`. `places`, `units` and `entries` are those of
    :class:`kernels.attention.plan.Units`; `cos` and `sin` are float32 `[turns, PAIRS]`. A query head's KV head is
    shared by `GROUP` of them. `scale` is that of logits in base 2.

    Writes each entry's output `parts` `[entries, heads, D]` and log-sum-exp in base 2 `sums` `[entries, heads]`,
    float32, from `first_entry` on.
    """
    head = tl.program_id(0) % num_kv_heads
    unit = units + (first_unit + tl.program_id(0) // num_kv_heads) * 5
    source, first_key, num_keys = tl.load(unit), tl.load(unit + 1), tl.load(unit + 2)
    first_user, num_rows = tl.load(unit + 3), tl.load(unit + 4) * GROUP

    rows = tl.arange(0, ROWS)
    is_row = rows < num_rows
    entry, query_heads = first_user + rows // GROUP, head * GROUP + rows % GROUP
    token = tl.load(entries + entry * 3, mask=is_row, other=0)
    turn = tl.load(entries + entry * 3 + 1, mask=is_row, other=0)
    seen = tl.load(entries + entry * 3 + 2, mask=is_row, other=1)
    q = _turned(
        query + token * query_token + query_heads * query_head, turn, cos, sin, is_row, HEAD_SIZE, WIDTH, PAIRS, IS_NEOX
    ).to(keys.dtype.element_ty)

    at = strides + source * 10
    key_start = tl.multiple_of(tl.load(at) + head * tl.load(at + 3), ALIGNED)
    key_page, key_token = tl.multiple_of(tl.load(at + 1), ALIGNED), tl.multiple_of(tl.load(at + 2), ALIGNED)
    value_start = tl.multiple_of(tl.load(at + 5) + head * tl.load(at + 8), ALIGNED)
    value_page, value_token = tl.multiple_of(tl.load(at + 6), ALIGNED), tl.multiple_of(tl.load(at + 7), ALIGNED)
    dims = tl.arange(0, WIDTH)
    key_dims, value_dims = dims, dims
    if not ADJACENT:
        key_dims, value_dims = dims * tl.load(at + 4), dims * tl.load(at + 9)

    most = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    result = tl.zeros([ROWS, WIDTH], tl.float32)
    for first in range(0, num_keys, KEYS):
        key = first + tl.arange(0, KEYS)
        place = tl.load(places + first_key + key, mask=key < num_keys, other=0)
        page, offset = place >> PLACE_BITS, place & ((1 << PLACE_BITS) - 1)
        mask = (key < num_keys)[:, None]
        if HEAD_SIZE < WIDTH:
            mask = mask & (dims < HEAD_SIZE)[None, :]
        start = key_start + page * key_page + offset * key_token
        k = tl.load(keys + start[:, None] + key_dims[None, :], mask=mask, other=0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        scores = tl.where(key[None, :] < seen[:, None], scores, float("-inf"))
        # A row sees the first key of its unit: from the first tile on its maximum is a number.
        new_most = tl.maximum(most, tl.max(scores, 1))
        weights = tl.exp2(scores - new_most[:, None])
        shrink = tl.exp2(most - new_most)
        most, total = new_most, total * shrink + tl.sum(weights, 1)
        start = value_start + page * value_page + offset * value_token
        v = tl.load(values + start[:, None] + value_dims[None, :], mask=mask, other=0)
        result = tl.dot(weights.to(v.dtype), v, result * shrink[:, None], input_precision=PRECISION)

    row = (entry - first_entry) * (num_kv_heads * GROUP) + query_heads
    mask = is_row[:, None] & (dims < HEAD_SIZE)[None, :]
    tl.store(parts + row[:, None] * HEAD_SIZE + dims[None, :], result / total[:, None], mask=mask)
    tl.store(sums + row, most + tl.log2(total), mask=is_row)


@triton.jit(
    do_not_specialize=["first_token", "first_entry"],
    do_not_specialize_on_alignment=["tokens", "order", "bounds"],
)
def merge_units(
    output,
    parts,
    sums,
    tokens,
    order,
    bounds,
    output_token,
    output_head,
    num_heads,
    first_token,
    first_entry,
    HEAD_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    """Merges the parts of tokens from `first_token` on, a program for each of their heads.

    `tokens`, `order` and `bounds` are those of :class:`kernels.attention.plan.Units`; the others as above.
    """
    index, head = first_token + tl.program_id(0) // num_heads, tl.program_id(0) % num_heads
    first, end = tl.load(bounds + index), tl.load(bounds + index + 1)
    dims = tl.arange(0, WIDTH)
    most, total, result = float("-inf"), 0.0, tl.zeros([WIDTH], tl.float32)
    for start in range(first, end, ENTRIES):
        at = start + tl.arange(0, ENTRIES)
        row = (tl.load(order + at, mask=at < end, other=first_entry) - first_entry) * num_heads + head
        sum_of = tl.load(sums + row, mask=at < end, other=float("-inf"))
        mask = (at < end)[:, None] & (dims < HEAD_SIZE)[None, :]
        part = tl.load(parts + row[:, None] * HEAD_SIZE + dims[None, :], mask=mask, other=0)
        new_most = tl.maximum(most, tl.max(sum_of, 0))
        weights, shrink = tl.exp2(sum_of - new_most), tl.exp2(most - new_most)
        result = result * shrink + tl.sum(weights[:, None] * part, 0)
        most, total = new_most, total * shrink + tl.sum(weights, 0)
    write = output + tl.load(tokens + index) * output_token + head * output_head + dims
    tl.store(write, (result / total).to(output.dtype.element_ty), mask=dims < HEAD_SIZE)
