# SPDX-License-Identifier: Apache-2.0
"""Matrix products and maxima in explicit vectors of 16 float32, for compiled code.

Numba's own vectorized loops read and write each result at every step. Here the results of four rows and 32 columns stay
in registers: about twice as fast, near a core's limit. LLVM maps the vectors to the instructions that the CPU has.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

Array = NDArray[Any]

ROWS = 4
"""Rows are computed in multiples of this number, columns in multiples of :data:`COLUMNS`."""
COLUMNS = 16

_VECTOR = ir.VectorType(ir.FloatType(), COLUMNS)
_INT64 = ir.IntType(64)
_BYTES = 4


def _panel(vectors: int) -> Any:
    """A function that writes a product to 4 rows and ``vectors`` x 16 columns.

    It takes the addresses of ``out``, ``a`` and ``b``, the length of the inner dimension, the row lengths of the three
    matrices, and whether to add the product instead.
    """
    signature = types.void(*[types.uintp] * 3, *[types.intp] * 4, types.boolean)

    @intrinsic  # type: ignore[untyped-decorator]
    def panel(
        context: Any, out: Any, a: Any, b: Any, inner: Any, out_row: Any, a_row: Any, b_row: Any, adds: Any
    ) -> Any:
        return signature, lambda target, builder, _, arguments: _emit(target, builder, vectors, *arguments)

    return panel


def _emit(
    target: Any,
    builder: Any,
    vectors: int,
    out: Any,
    a: Any,
    b: Any,
    inner: Any,
    out_row: Any,
    a_row: Any,
    b_row: Any,
    adds: Any,
) -> Any:
    cells = [(row, vector) for row in range(ROWS) for vector in range(vectors)]

    def address(matrix: Any, row: Any, row_length: Any, column: Any, kind: Any) -> Any:
        elements = builder.add(builder.mul(row, row_length), column)
        return builder.inttoptr(builder.add(matrix, builder.mul(elements, _INT64(_BYTES))), ir.PointerType(kind))

    def of_out(row: int, vector: int) -> Any:
        return address(out, _INT64(row), out_row, _INT64(vector * COLUMNS), _VECTOR)

    nothing = ir.Constant(_VECTOR, [0.0] * COLUMNS)
    results = {cell: cgutils.alloca_once(builder, _VECTOR) for cell in cells}  # LLVM keeps them in registers
    for cell, result in results.items():
        builder.store(builder.select(adds, builder.load(of_out(*cell), align=_BYTES), nothing), result)
    with cgutils.for_range(builder, inner) as loop:
        right = [
            builder.load(address(b, loop.index, b_row, _INT64(vector * COLUMNS), _VECTOR), align=_BYTES)
            for vector in range(vectors)
        ]
        for row in range(ROWS):
            left = _spread(builder, builder.load(address(a, _INT64(row), a_row, loop.index, ir.FloatType())))
            for vector in range(vectors):
                product = builder.fmul(left, right[vector], flags=("contract",))
                result = results[row, vector]
                builder.store(builder.fadd(product, builder.load(result), flags=("contract",)), result)
    for cell, result in results.items():
        builder.store(builder.load(result), of_out(*cell), align=_BYTES)
    return target.get_dummy_value()


def _spread(builder: Any, value: Any) -> Any:
    """A vector of equal elements."""
    undefined, first = ir.Constant(_VECTOR, ir.Undefined), ir.Constant(ir.IntType(32), 0)
    lanes = ir.Constant(ir.VectorType(ir.IntType(32), COLUMNS), [0] * COLUMNS)
    return builder.shuffle_vector(builder.insert_element(undefined, value, first), undefined, lanes)


_wide, _narrow = _panel(2), _panel(1)


@njit(cache=True, nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def product(out: Array, a: Array, b: Array, rows: int, inner: int, columns: int, adds: bool) -> None:
    """Writes ``a[:rows, :inner] @ b[:inner, :columns]`` to ``out``, or adds it.

    All are float32 matrices in C order. ``rows`` and ``columns`` are rounded up to multiples of 4 and 16, so the
    matrices must have that many; what ``out`` has behind ``rows`` and ``columns`` is undefined then.
    """
    to, left, right = out.ctypes.data, a.ctypes.data, b.ctypes.data
    out_row, a_row, b_row = out.shape[1], a.shape[1], b.shape[1]
    for row in range(0, rows, ROWS):
        start, line = to + row * out_row * _BYTES, np.uintp(left + row * a_row * _BYTES)
        for column in range(0, columns, 2 * COLUMNS):
            at, of = np.uintp(start + column * _BYTES), np.uintp(right + column * _BYTES)
            if columns - column > COLUMNS:
                _wide(at, line, of, inner, out_row, a_row, b_row, adds)
            else:
                _narrow(at, line, of, inner, out_row, a_row, b_row, adds)


@intrinsic  # type: ignore[untyped-decorator]
def _maximum_of_vectors(context: Any, row: Any, vectors: Any) -> Any:
    """The maximum of ``vectors`` x 16 float32 at an address, without NaN; at least one vector."""

    def emit(target: Any, builder: Any, _: Any, arguments: Any) -> Any:
        address, count = arguments
        start = builder.inttoptr(address, ir.PointerType(_VECTOR))
        most = cgutils.alloca_once_value(builder, builder.load(start, align=_BYTES))
        with cgutils.for_range(builder, count) as loop:
            here = builder.load(builder.gep(start, [loop.index]), align=_BYTES)
            before = builder.load(most)
            builder.store(builder.select(builder.fcmp_ordered(">", here, before), here, before), most)
        kind = ir.FunctionType(ir.FloatType(), [_VECTOR])
        reduce = cgutils.get_or_insert_function(builder.module, kind, f"llvm.vector.reduce.fmax.v{COLUMNS}f32")
        return builder.call(reduce, [builder.load(most)], fastmath=("nnan",))

    return types.float32(types.uintp, types.intp), emit


@njit(cache=True, nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def maximum(row: Array, length: int) -> Any:
    """The maximum of the first ``length`` numbers of ``row``, float32 without NaN."""
    whole = length // COLUMNS
    most = _maximum_of_vectors(np.uintp(row.ctypes.data), whole) if whole else row[0]
    for i in range(whole * COLUMNS, length):
        most = max(most, row[i])
    return most
