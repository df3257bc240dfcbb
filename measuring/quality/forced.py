# SPDX-License-Identifier: Apache-2.0
"""Makes the engine generate the request's tokens, to read their log probabilities.

vLLM takes log probabilities before logits processors run, so they are the model's own. (Structured output won't do:
its mask is applied first.)
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor, RequestLogitsProcessor

from measuring.quality.client import FORCED_TOKENS


class ForcedTokens(AdapterLogitsProcessor):
    """A logits processor for vLLM's ``--logits-processors``; requests name their tokens in ``vllm_xargs``."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        """The request's own processor; ``None`` if it names no tokens."""
        forced: Sequence[Any] | None = (params.extra_args or {}).get(FORCED_TOKENS)
        if not forced:
            return None
        token_ids = [int(token) for token in forced]

        def only_next(output_ids: list[int], logits: Tensor) -> Tensor:
            """Rules out all tokens but the one that is next, in ``logits`` of shape ``[vocabulary]``."""
            if len(output_ids) >= len(token_ids):
                return logits
            token = token_ids[len(output_ids)]
            ruled_out = logits.new_full(logits.shape, float("-inf"))
            ruled_out[token] = logits[token]
            return ruled_out

        return only_next
