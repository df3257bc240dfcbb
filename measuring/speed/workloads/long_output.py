# SPDX-License-Identifier: Apache-2.0
"""Long answers over one context: what is saved before the first token, against what all tokens take."""

from measuring.speed.samples import Claim, Ratio, Value
from measuring.speed.workloads.context import Context, Sizes


class LongOutput(Context):
    """Time to the last token."""

    name = "long_output"
    title = "long answers over 4096 tokens of chunks"
    values: tuple[Value, ...] = ("ttft_s", "tpot_s", "latency_s")
    short = Sizes((8,), rounds=1, max_tokens=32)
    long = Sizes((8,), rounds=10, max_tokens=256)

    def claims(self) -> list[Claim]:
        return [
            Ratio(self.name, "4096", "latency_s", "stock", "warm"),
            Ratio(self.name, "4096", "latency_s", "stock", "empty"),
            Ratio(self.name, "4096", "tpot_s", "warm", "stock"),
        ]
