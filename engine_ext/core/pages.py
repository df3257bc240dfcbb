# SPDX-License-Identifier: Apache-2.0
"""Tokens in the pages of one layer's pool, ``[pages, page_tokens, heads, size]``."""

import itertools
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor


class WrongPagesError(ValueError):
    """Pages have another tag than expected, or a file another shape than the pool; nothing was moved."""


def tokens_of(pool: Tensor, pages: Sequence[int], num_tokens: int) -> Tensor:
    """A copy of the first ``num_tokens`` tokens in ``pages``, ``[num_tokens, heads, size]``."""
    return pool[list(pages)].flatten(0, 1)[:num_tokens]


def page_rows(pages: Sequence[int], page_tokens: int) -> Tensor:
    """Rows of all tokens in ``pages``, int64, of a pool ``[rows, heads, size]``."""
    first = torch.tensor(pages, dtype=torch.int64) * page_tokens
    return (first[:, None] + torch.arange(page_tokens)).flatten()


def fill_pages(pool: Tensor, pages: Sequence[int], tensor: Tensor) -> None:
    """Copies ``[tokens, heads, size]`` to pages, as many at once as lie side by side."""
    page_tokens = pool.shape[1]
    full = len(tensor) // page_tokens
    start = 0
    for first, count in _runs(pages[:full]):
        end = start + count * page_tokens
        pool[first : first + count].copy_(tensor[start:end].view(count, page_tokens, *tensor.shape[1:]))
        start = end
    if start < len(tensor):
        pool[pages[full], : len(tensor) - start].copy_(tensor[start:])


def check_tensors(pools: Mapping[str, Tensor], tensors: Mapping[str, Tensor], num_tokens: int) -> None:
    """Raises :class:`WrongPagesError` unless ``tensors`` are ``num_tokens`` tokens of each of ``pools``."""
    if tensors.keys() != pools.keys():
        raise WrongPagesError(f"a file of {len(tensors)} tensors for a pool of {len(pools)}")
    for name, tensor in tensors.items():
        pool = pools[name]
        shape = (num_tokens, *pool.shape[2:])
        if tensor.shape != shape or tensor.dtype != pool.dtype:
            raise WrongPagesError(f"{name} is {tensor.dtype} {list(tensor.shape)}, not {pool.dtype} {list(shape)}")


def relative_difference(a: Tensor, b: Tensor) -> float:
    """Largest difference, as a share of the largest value in ``a``; infinite if not a number."""
    a, b = a.float(), b.float()
    scale = max(float(a.abs().max()), 1e-9)
    difference = float((a - b).abs().max()) / scale
    return difference if difference == difference else float("inf")


def _runs(pages: Sequence[int]) -> Iterator[tuple[int, int]]:
    """First page and number of pages of each run of successive pages."""
    for _, run in itertools.groupby(enumerate(pages), key=lambda item: item[1] - item[0]):
        numbers = [page for _, page in run]
        yield numbers[0], len(numbers)
