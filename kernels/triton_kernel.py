# SPDX-License-Identifier: Apache-2.0
"""Triton: copies tokens between paged tensors, for many layers in one launch, and rotates them if wanted.

The kernel keeps to what Triton 3.2 and Triton-Ascend have: a one-dimensional grid whose programs stride over the work,
no atomics, and no call of Triton's own jitted functions, so that Triton's interpreter runs it on a CPU as it is.
"""

# Pointers and scalars have no static type in a kernel.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def _head_starts(
    layers,
    layer,
    tokens,
    at,
    is_token,
    block_stride,
    token_stride,
    head_start,
    SIZE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Distances in elements, int64 `[TILE]`, of the tokens' heads from the first layer's first element."""
    token = tl.load(tokens + at, mask=is_token, other=0)
    start = tl.multiple_of(tl.load(layers + layer), ALIGNED) + head_start
    return start + (token // SIZE) * block_stride + (token % SIZE) * token_stride


@triton.jit
def _copy_dims(
    read,
    write,
    is_token,
    source_dim,
    target_dim,
    FIRST: tl.constexpr,
    END: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Copies dims `[FIRST, END)` of the tokens' heads, whose bits stay."""
    dims = tl.arange(0, WIDTH)
    mask = is_token[:, None] & ((dims >= FIRST) & (dims < END))[None, :]
    values = tl.load(read[:, None] + dims[None, :] * source_dim, mask=mask)
    tl.store(write[:, None] + dims[None, :] * target_dim, values, mask=mask)


# Values that differ between calls must not be compiled in: a request would wait for the compiler.
@triton.jit(do_not_specialize=["num_tokens", "num_tiles", "num_items", "num_turns"])
def move_tokens(
    source,
    target,
    source_layers,
    target_layers,
    source_tokens,
    target_tokens,
    num_tokens,
    num_tiles,
    num_heads,
    num_items,
    source_block,
    source_token,
    source_head,
    source_dim,
    target_block,
    target_token,
    target_head,
    target_dim,
    turns,
    cos,
    sin,
    tables,
    num_turns,
    SOURCE_SIZE: tl.constexpr,
    TARGET_SIZE: tl.constexpr,
    ALIGNED: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    PAIRS: tl.constexpr,
    PAIRS_WIDTH: tl.constexpr,
    IS_NEOX: tl.constexpr,
):
    """Copies `HEAD_SIZE` elements of each token, head and layer; the first `2 * PAIRS` of them rotated.

    `source` and `target` are the first layer's; `*_layers`, int64 `[layers]`, have each layer's distance from it in
    elements, a multiple of `ALIGNED`. `*_tokens`, int64 `[n]`, have each token's slot or row, of which `*_SIZE` lie in
    a block or page. Strides follow them. An item of work is a tile of tokens of one head of one layer.

    `turns`, int64 `[n]`, has each token's rotation, or -1 for none. `cos` and `sin` are float32 `[tables, num_turns,
    PAIRS]`, and `tables`, int64 `[layers]`, has each layer's, or -1 if it is not rotated. A pair is `(i, i + PAIRS)`
    if `IS_NEOX`, else `(2 i, 2 i + 1)`. It is rotated in float32 and rounded once; unrotated elements keep their bits.
    Each width is the smallest power of two not below its size.
    """
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        at = (item % num_tiles) * TILE + tl.arange(0, TILE)
        layer = item // (num_tiles * num_heads)
        head = ((item // num_tiles) % num_heads).to(tl.int64)
        is_token = at < num_tokens
        read = source + _head_starts(
            source_layers,
            layer,
            source_tokens,
            at,
            is_token,
            source_block,
            source_token,
            head * source_head,
            SOURCE_SIZE,
            ALIGNED,
        )
        write = target + _head_starts(
            target_layers,
            layer,
            target_tokens,
            at,
            is_token,
            target_block,
            target_token,
            head * target_head,
            TARGET_SIZE,
            ALIGNED,
        )
        if PAIRS > 0:
            table = tl.load(tables + layer)
            if table < 0:
                _copy_dims(read, write, is_token, source_dim, target_dim, 0, 2 * PAIRS, WIDTH)
            else:
                pairs, dims = tl.arange(0, PAIRS_WIDTH), tl.arange(0, 2 * PAIRS_WIDTH)
                mask = is_token[:, None] & (pairs < PAIRS)[None, :]
                turn = tl.load(turns + at, mask=is_token, other=-1)
                row = table * num_turns + tl.where(turn < 0, 0, turn)
                c = tl.load(cos + row[:, None] * PAIRS + pairs[None, :], mask=mask)
                s = tl.load(sin + row[:, None] * PAIRS + pairs[None, :], mask=mask)
                if IS_NEOX:
                    x = tl.load(read[:, None] + pairs[None, :] * source_dim, mask=mask)
                    y = tl.load(read[:, None] + (pairs + PAIRS)[None, :] * source_dim, mask=mask)
                else:  # as neighbours, which are moved many at once
                    is_turned = is_token[:, None] & (dims < 2 * PAIRS)[None, :]
                    both = tl.load(read[:, None] + dims[None, :] * source_dim, mask=is_turned)
                    x, y = tl.split(tl.reshape(both, (TILE, PAIRS_WIDTH, 2)))
                x32, y32 = x.to(tl.float32), y.to(tl.float32)
                is_still = (turn < 0)[:, None]
                x = tl.where(is_still, x, (x32 * c - y32 * s).to(x.dtype))
                y = tl.where(is_still, y, (y32 * c + x32 * s).to(y.dtype))
                if IS_NEOX:
                    tl.store(write[:, None] + pairs[None, :] * target_dim, x, mask=mask)
                    tl.store(write[:, None] + (pairs + PAIRS)[None, :] * target_dim, y, mask=mask)
                else:
                    both = tl.reshape(tl.join(x, y), (TILE, 2 * PAIRS_WIDTH))
                    tl.store(write[:, None] + dims[None, :] * target_dim, both, mask=is_turned)
        if 2 * PAIRS < HEAD_SIZE:
            _copy_dims(read, write, is_token, source_dim, target_dim, 2 * PAIRS, HEAD_SIZE, WIDTH)
