# SPDX-License-Identifier: Apache-2.0
"""Converts a GGUF model to bfloat16 for transformers and vLLM: ``python -m app.models.dequantize GGUF FOLDER``."""

import functools
import sys
from collections.abc import Sequence
from pathlib import Path


def main(arguments: Sequence[str]) -> None:
    """Writes weights, configuration and tokenizer to the folder."""
    import gguf
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    # transformers reads the file three times; its vocabulary alone takes seconds.
    setattr(gguf, "GGUFReader", functools.cache(gguf.GGUFReader))  # noqa: B010 – mypy takes no assignment to a class
    source, folder = Path(arguments[0]), arguments[1]
    options = {"gguf_file": source.name, "local_files_only": True}
    dequantized = {"quantization_config": GgufConfig(dequantize=True), "dtype": torch.bfloat16}
    AutoModelForCausalLM.from_pretrained(source.parent, **options, **dequantized).save_pretrained(folder)
    AutoTokenizer.from_pretrained(source.parent, **options).save_pretrained(folder)


if __name__ == "__main__":
    main(sys.argv[1:])
