# SPDX-License-Identifier: Apache-2.0
"""Perplexity of models on the same plain text, and its ratio to the first model's.

    python research/measure_perplexity.py TEXT MODEL [MODEL ...]

The text is read in windows; the tokens of a window's first half are context only.
"""

import argparse
import math
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


@torch.inference_mode()
def losses(folder: Path, text: str, windows: int, length: int) -> torch.Tensor:
    """Mean negative log likelihood of each window's second half, in nats per token, ``[windows]``."""
    tokens = AutoTokenizer.from_pretrained(folder, local_files_only=True).encode(text, add_special_tokens=False)
    ids = torch.tensor(tokens[: len(tokens) // length * length]).view(-1, length)[:windows]
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    found = []
    for window in ids:
        logits = model(window[None]).logits[0, length // 2 - 1 : -1]
        found.append(torch.nn.functional.cross_entropy(logits, window[length // 2 :]))
    return torch.stack(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("text", type=Path, help="text file")
    parser.add_argument("models", type=Path, nargs="+", help="model folders; the first one is compared with")
    parser.add_argument("--windows", type=int, default=60, help="number of windows (default: 60)")
    parser.add_argument("--length", type=int, default=512, help="tokens of a window (default: 512)")
    args = parser.parse_args()
    text = args.text.read_text(encoding="utf-8")
    first = None
    for model in args.models:
        mean = float(losses(model, text, args.windows, args.length).mean())
        first = mean if first is None else first
        print(f"{model}: {math.exp(mean):.3f}, {100 * (math.exp(mean - first) - 1):+.2f} %")


if __name__ == "__main__":
    main()
