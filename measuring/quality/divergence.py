# SPDX-License-Identifier: Apache-2.0
"""The distance of two predictions of the next token."""

import math
from collections.abc import Iterable, Mapping
from typing import Final, TypeVar

TOP: Final = 20
"""Most probable tokens of each position whose log probabilities are compared, where the server allows as many."""
_LEAST: Final = -20.0
"""Lower bound of log probabilities, against rounding and tokens that are ruled out."""

_Token = TypeVar("_Token")


def kl_divergence(full: Mapping[_Token, float], cached: Mapping[_Token, float]) -> float:
    """Kullback-Leibler divergence D(full || cached) in nats, at least, of two distributions over the vocabulary.

    Each has log probabilities of some tokens. Tokens in both are compared one by one, all others as if they were one
    token, which can only lower the result.
    """
    pairs = [(full[token], cached[token]) for token in full.keys() & cached.keys()]
    pairs.append((_log_of_others(one for one, _ in pairs), _log_of_others(other for _, other in pairs)))
    terms = (math.exp(one) * (max(one, _LEAST) - max(other, _LEAST)) for one, other in pairs)
    return float(max(0.0, sum(terms)))


def _log_of_others(logprobs: Iterable[float]) -> float:
    left = 1 - sum(map(math.exp, logprobs))
    return math.log(left) if left > 0 else _LEAST
