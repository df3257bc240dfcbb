# SPDX-License-Identifier: Apache-2.0
"""What one tensor parallel size stores, every other reads; what several workers have is stored once."""

import pytest

from tests.cores import all_cores
from tests.engine.conftest import ALWAYS_FETCHING
from tests.engine.server import TesseraServer
from tests.families import FAMILIES
from tests.oracle import Oracle
from tests.support.exactness import ask, assert_exact, statuses
from tests.support.tier_servers import FILES, archived

SIZED = ("--max-model-len", "1024", "--kv-cache-memory-bytes", "32M", "--chunk-cache-memory", "16MiB")
FLAGS = ("--dtype", "float32", "--enforce-eager", *SIZED)
# The rotary operator of vLLM's CPU build miscomputes the positional part of latent attention (0.32).
NATIVE = ("--compilation-config", '{"custom_ops": ["none"]}')
SYSTEM = "You answer from documents."


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("model", "sizes", "num_files"),
    [("tiny-qwen3-mha", (4, 1, 2), 4), ("tiny-llama", (4, 2), 2), ("DeepSeek V2, MLA", (2, 1), 1)],
    ids=["a head each", "heads that two workers have", "latent attention"],
)
def test_every_size_reads_what_another_stored(model, sizes, num_files, model_path, tmp_path, text):
    is_latent = model in FAMILIES
    folder = FAMILIES[model].build(tmp_path / "model") if is_latent else model_path(model)
    oracle, chunks = Oracle(folder), [text(100), text(37), text(64)]
    for size in sizes:
        with all_cores():
            server = TesseraServer(
                tmp_path / f"server-{size}.log",
                *(str(folder), *FLAGS, *(NATIVE if is_latent else ()), "--tensor-parallel-size", str(size)),
                *("--chunk-cache-tiers", FILES.format(folder=tmp_path / "kv")),
                serve=ALWAYS_FETCHING,
                environment={"VLLM_CPU_OMP_THREADS_BIND": "|".join("0101"[:size])},
            )
        try:
            server.wait_ready()
            first, again = (ask(server, "offset", order, text(20), system=SYSTEM) for order in (chunks, chunks[::-1]))
            archived(server)
        finally:
            server.stop()
        assert statuses(first) == ["filled" if size == sizes[0] else "loaded"] * len(chunks)
        assert statuses(again) == ["hit"] * len(chunks)
        for response in (first, again):
            assert_exact(response, oracle, "offset")
        stored = [*(tmp_path / "kv").rglob("*.safetensors")]
        assert len(stored) == num_files * (1 + len(chunks))
