# SPDX-License-Identifier: Apache-2.0
"""An adapter that runs only where chunks are computed: exact, and everything else as without it."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.engine.server import TesseraServer
from tests.support.adapters import ChunkAdapter
from tests.support.exactness import STRATEGIES, ask, assert_exact, assert_filled_hit_and_mixed_are_exact, statuses

Text = Callable[[int], str]
Serve = Callable[..., TesseraServer]


@pytest.fixture(scope="module")
def adapter(model_path: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> ChunkAdapter:
    return ChunkAdapter.make("writer", model_path("tiny-llama"), tmp_path_factory.mktemp("adapters"))


@pytest.fixture
def adapted(serve: Serve, adapter: ChunkAdapter) -> TesseraServer:
    return serve("tiny-llama", "--chunk-adapter", str(adapter.folder))


def test_filled_hit_and_mixed(adapted: TesseraServer, adapter: ChunkAdapter, oracle: Any, text: Text) -> None:
    assert_filled_hit_and_mixed_are_exact(adapted, adapter.oracle, text)
    answer = ask(adapted, "offset", [text(80), text(60)], text(15))
    assert answer["cache"]["adapter"]
    with pytest.raises(AssertionError):  # the adapter matters
        assert_exact(answer, oracle("tiny-llama"), "offset", tolerance=0.1)
