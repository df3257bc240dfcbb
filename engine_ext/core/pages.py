# SPDX-License-Identifier: Apache-2.0
"""Pages of the pool: their tags, and tokens in one layer's pool ``[pages, page_tokens, heads, size]``."""

import itertools
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from engine_ext.wire.plan import Span


class WrongPagesError(ValueError):
    """Pages have another tag than expected, or a file another shape than the pool; nothing was moved."""


_NO_TAG = -1
"""Of pages that nobody has saved to, or that are being written; real tags are not negative."""
_PERCENTILE: Final = 0.999
_EXTREME: Final = 4
"""A single difference may be so many times the percentile's tolerance."""


def partly(tag: int) -> int:
    """The tag of pages that the engine has saved a part to; ``tag`` follows with the rest."""
    return _NO_TAG - 1 - tag


class PageTags:
    """The tag last saved to each page."""

    def __init__(self, num_pages: int = 0) -> None:
        self._tags = np.full(num_pages, _NO_TAG, np.int64)
        self._found: set[int] = set()
        """Tags that :meth:`missing_now` has found on all of their pages, since tags were last removed."""

    def put(self, pages: Sequence[int], tag: int) -> None:
        """Tags pages, which are complete now."""
        self._tags[list(pages)] = tag

    def put_first(self, pages: Sequence[int], tag: int) -> None:
        """Tags pages that nobody has saved to. Removes all tags and raises :class:`WrongPagesError` otherwise."""
        try:
            self.check(pages, _NO_TAG)
        except WrongPagesError:
            self.remove(pages)
            raise
        self.put(pages, tag)

    def remove(self, pages: Sequence[int]) -> None:
        """Removes the tags of pages, before they are written."""
        self._found = set()
        self._tags[list(pages)] = _NO_TAG

    def clear(self) -> None:
        """Removes the tags of all pages."""
        self._found = set()
        self._tags.fill(_NO_TAG)

    def missing(self, spans: Iterable[Span]) -> set[int]:
        """Tags of the spans that have a page with another tag."""
        spans = list(spans)
        counts = [len(span.pages) for span in spans]
        pages = np.fromiter(itertools.chain.from_iterable(span.pages for span in spans), np.int64, sum(counts))
        expected = np.repeat(np.array([span.tag for span in spans], np.int64), counts)
        return set(expected[self._tags[pages] != expected].tolist())

    def missing_now(self, spans: Iterable[Span]) -> set[int]:
        """As :meth:`missing`; quick for spans of the last call, if no tag was removed in between."""
        found, by_tag = self._found, {span.tag: span for span in spans}
        missing = self.missing(span for tag, span in by_tag.items() if tag not in found)
        self._found = {tag for tag in by_tag if tag not in missing}
        return missing

    def difference(self, spans: Iterable[Span], tags: Container[int]) -> str:
        """Say which pages of the spans with these tags have another, as the operator's clue to whose they are now."""
        return ", ".join(
            f"page {page} has {_name(found)} instead of tag {span.tag}"
            for span in spans
            if span.tag in tags
            for page in span.pages
            if (found := int(self._tags[page])) != span.tag
        )

    def check(self, pages: Sequence[int], tag: int) -> None:
        """Raises :class:`WrongPagesError` if one of the pages has another tag."""
        if (self._tags[list(pages)] != tag).any():
            raise WrongPagesError(f"pages {list(pages)[:8]} don't have the tag {tag}")


def _name(tag: int) -> str:
    return f"tag {tag}" if tag > _NO_TAG else "no tag" if tag == _NO_TAG else "an unfinished fill"


def tokens_of(pool: Tensor, pages: Sequence[int], num_tokens: int) -> Tensor:
    """A copy of the first ``num_tokens`` tokens in ``pages``, ``[num_tokens, heads, size]``."""
    return pool[list(pages)].flatten(0, 1)[:num_tokens]


def copy_tokens(pools: Mapping[str, Tensor], pages: Sequence[int], tensors: Mapping[str, Tensor]) -> None:
    """Copies the first tokens in ``pages`` of each pool to its tensor ``[tokens, heads, size]`` on the CPU.

    Queued on a device's current stream, which is not waited for.
    """
    places = _Places()
    for name, tensor in tensors.items():
        pool = pools[name]
        if pool.device.type == "cpu":
            for run, part in _parts(pool, pages, tensor):
                part.copy_(run)
        else:
            tensor.copy_(pool[places.of(pool, pages, len(tensor))], non_blocking=True)


def fill_pages(pools: Mapping[str, Tensor], pages: Sequence[int], tensors: Mapping[str, Tensor]) -> None:
    """Copies tensors ``[tokens, heads, size]`` to the first tokens in ``pages`` of their pools.

    Queued on a device's current stream, which is not waited for: pinned tensors must stay as they are until it has.
    """
    places = _Places()
    for name, tensor in tensors.items():
        pool = pools[name]
        if pool.device.type == "cpu":
            for run, part in _parts(pool, pages, tensor):
                run.copy_(part)
        else:
            staged = pool.new_empty(tensor.shape)
            staged.copy_(tensor, non_blocking=True)
            pool.index_put_(places.of(pool, pages, len(tensor)), staged)


class _Places:
    """Where the tokens of a segment are in pools of one device; a list of pages would be sent and awaited each time."""

    def __init__(self) -> None:
        self._found: tuple[Tensor, ...] = ()

    def of(self, pool: Tensor, pages: Sequence[int], num_tokens: int) -> tuple[Tensor, ...]:
        """Pages and offsets of the tokens, int64 ``[num_tokens]`` each, on the pool's device."""
        if not self._found:
            tokens, page_tokens = np.arange(num_tokens), pool.shape[1]
            found = np.stack((np.array(pages, np.int64)[tokens // page_tokens], tokens % page_tokens))
            sent = pool.new_empty(found.shape, dtype=torch.int64)
            sent.copy_(torch.from_numpy(found), non_blocking=True)
            self._found = sent.unbind()
        return self._found


def check_tensors(pools: Mapping[str, Tensor], tensors: Mapping[str, Tensor], num_tokens: int) -> None:
    """Raises :class:`WrongPagesError` unless ``tensors`` are ``num_tokens`` tokens of each of ``pools``."""
    if tensors.keys() != pools.keys():
        raise WrongPagesError(f"a file of {len(tensors)} tensors for a pool of {len(pools)}")
    for name, tensor in tensors.items():
        pool = pools[name]
        shape = (num_tokens, *pool.shape[2:])
        if tensor.shape != shape or tensor.dtype != pool.dtype:
            raise WrongPagesError(f"{name} is {tensor.dtype} {list(tensor.shape)}, not {pool.dtype} {list(shape)}")


def largest_difference(
    pools: Iterable[Tensor], pages_a: Sequence[int], pages_b: Sequence[int], num_tokens: int
) -> float:
    """Largest :func:`relative_difference` between the tokens in two runs of pages."""
    return max(
        relative_difference(tokens_of(pool, pages_a, num_tokens), tokens_of(pool, pages_b, num_tokens))
        for pool in pools
    )


def relative_difference(a: Tensor, b: Tensor) -> float:
    """How far ``b`` is from ``a``, both ``[tokens, heads, size]``; infinite if not a number.

    A difference is a share of the largest value in its own dimension of its head, or in the head's median one if that
    is larger: outliers of K are a hundred times other dimensions, and a share of theirs would hide whatever is wrong in
    those. The result is the worst head's 99.9th percentile, which sees any one dimension and passes rounding's rare
    extremes, or a share of the largest difference, if more.
    """
    a, b = a.cpu().float(), b.cpu().float()  # not every device has quantiles
    largest = a.abs().amax(0)
    scale = torch.maximum(largest, largest.median(-1, keepdim=True).values).clamp(min=1e-9)
    by_head = ((a - b).abs() / scale).transpose(0, 1).flatten(1)
    typical, extreme = by_head.quantile(_PERCENTILE, dim=1).max(), by_head.max()
    difference = float(torch.maximum(typical, extreme / _EXTREME))
    return difference if difference == difference else float("inf")


def _parts(pool: Tensor, pages: Sequence[int], tensor: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Views of pages that lie side by side, and of their tokens in ``tensor``."""
    page_tokens = pool.shape[1]
    full = len(tensor) // page_tokens
    start = 0
    for first, count in _runs(pages[:full]):
        end = start + count * page_tokens
        yield pool[first : first + count], tensor[start:end].view(count, page_tokens, *tensor.shape[1:])
        start = end
    if start < len(tensor):
        yield pool[pages[full], : len(tensor) - start], tensor[start:]


def _runs(pages: Sequence[int]) -> Iterator[tuple[int, int]]:
    """First page and number of pages of each run of successive pages."""
    for _, run in itertools.groupby(enumerate(pages), key=lambda item: item[1] - item[0]):
        numbers = [page for _, page in run]
        yield numbers[0], len(numbers)
