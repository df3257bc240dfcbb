# SPDX-License-Identifier: Apache-2.0
"""Online softmax (https://arxiv.org/abs/1805.02867) in tiles and in parts, compiled by Numba, in float32."""

import math
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from kernels.attention.vectors import maximum

Array = NDArray[Any]

_F = np.float32
_LOG2E = _F(math.log2(math.e))
# 1.5 * 2**23: adding it rounds a float32 to an integer.
_ROUND = _F(12582912.0)
_LEAST_EXPONENT = _F(-126.0)
# Taylor coefficients of 2**x; the error for |x| <= 0.5 is below a float32's rounding.
_C1, _C2, _C3, _C4, _C5, _C6 = (_F(math.log(2) ** n / math.factorial(n)) for n in range(1, 7))

# No `reassoc`: it would cancel _ROUND.
STRICT = {"contract", "nsz", "arcp"}


@njit(cache=True, nogil=True, error_model="numpy", fastmath=True)  # type: ignore[untyped-decorator]
def _sum(row: Array, length: int) -> Any:
    total = _F(0)
    for i in range(length):
        total += row[i]
    return total


@njit(cache=True, nogil=True, error_model="numpy", fastmath=True)  # type: ignore[untyped-decorator]
def _scale(row: Array, length: int, factor: float) -> None:
    for i in range(length):
        row[i] *= factor


@njit(cache=True, nogil=True, error_model="numpy", fastmath=STRICT)  # type: ignore[untyped-decorator]
def _exponentials(row: Array, length: int, most: float, mantissas: Array, exponents: Array, powers: Array) -> None:
    """Replaces each x of ``row`` by exp(x - most); ``powers`` is ``exponents`` (int32) read as float32."""
    for i in range(length):
        x = max((row[i] - most) * _LOG2E, _LEAST_EXPONENT)
        whole = (x + _ROUND) - _ROUND
        y = x - whole
        mantissas[i] = _F(1) + y * (_C1 + y * (_C2 + y * (_C3 + y * (_C4 + y * (_C5 + y * _C6)))))
        exponents[i] = (np.int32(whole) + np.int32(127)) << np.int32(23)
    for i in range(length):
        row[i] = mantissas[i] * powers[i]


@njit(cache=True, nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def soften(scores: Array, rows: int, tokens: int, seen: Array, state: Array, out: Array, scratch: Array) -> None:
    """Turns scores into weights of the running softmax.

    ``seen`` ``[rows]`` is the number of the tile's keys that a row attends to, ``state`` ``[rows, 2]`` its maximum and
    sum so far, ``out`` ``[rows, D]`` its output so far.
    """
    exponents = scratch[1].view(np.int32)
    for r in range(rows):
        length = min(tokens, seen[r])
        if length <= 0:
            scores[r, :tokens] = 0
            continue
        most = maximum(scores[r], length)
        if most > state[r, 0]:
            factor = _F(math.exp(state[r, 0] - most))
            state[r, 1] *= factor
            _scale(out[r], out.shape[1], factor)
            state[r, 0] = most
        _exponentials(scores[r], length, state[r, 0], scratch[0], exponents, scratch[1])
        scores[r, length:tokens] = 0
        state[r, 1] += _sum(scores[r], length)


@njit(cache=True, nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def _add(state: Array, result: Array, other_state: Array, other_result: Array) -> None:
    """Adds another part's attention to ``state`` ``[2]`` and ``result`` ``[D]`` of one row."""
    if other_state[1] <= 0:
        return
    most = max(state[0], other_state[0])
    factor = _F(math.exp(state[0] - most)) if state[1] > 0 else _F(0)
    other = _F(math.exp(other_state[0] - most))
    state[0], state[1] = most, state[1] * factor + other_state[1] * other
    for i in range(len(result)):
        result[i] = result[i] * factor + other_result[i] * other


@njit(cache=True, nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def merge(out: Array, parts: Any, group: int) -> None:
    """Writes ``out`` for the heads that several shares have computed; a head of -1 is an unused slot."""
    heads, states, results = parts
    num_rows, size = results.shape[1:]
    state, result = np.empty(2, np.float32), np.empty(size, np.float32)
    for slot in range(len(heads)):
        head = heads[slot]
        if head < 0 or (heads[:slot] == head).any():
            continue
        for row in range(num_rows):
            state[0], state[1], result[:] = -np.inf, 0, 0
            for other in range(slot, len(heads)):
                if heads[other] == head:
                    _add(state, result, states[other, row], results[other, row])
            out[row // group, head * group + row % group] = result / state[1]
