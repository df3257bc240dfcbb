# SPDX-License-Identifier: Apache-2.0
"""A replica that decodes has its chunks computed by one that prefills: exactly, and by itself when that one dies."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.exactness import STRATEGIES, assert_exact, segments
from tests.support.split import Split
from tests.support.waiting import until

pytestmark = pytest.mark.matrix


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory, model_path: Callable[[str], Path]) -> Iterator[Split]:
    with ExitStack() as stack:
        yield Split(stack, tmp_path_factory.mktemp("roles"), model_path("tiny-llama"))


def test_chunks_are_computed_where_prompts_are_prefilled_until_that_replica_dies(split, oracle, text):
    prefill = split.start("prefill")
    split.router.wait_for("decode", "prefill")
    for strategy in STRATEGIES:
        a, b, c = text(200), text(37), text(400)
        for chunks in ((a, b), (c, a), (b, c)):
            answer = split.ask(*chunks, strategy=strategy)
            assert answer["cache"]["tokens"]["fill_computed"] == 0, answer["cache"]
            assert {chunk["status"] for chunk in answer["cache"]["chunks"]} <= {"fetched", "hit"}
            assert_exact(answer, oracle("tiny-llama"), strategy)
    # Killed in the middle of fills.
    documents = [text(1500) for _ in range(4)]
    with ThreadPoolExecutor(1) as thread:
        answered = thread.submit(split.ask, *documents)
        until(lambda: prefill.running_requests() > 0)
        prefill.process.kill()
        answer = answered.result()
    assert len(segments(answer["cache"])[1]) == 4
    assert answer["cache"]["tokens"]["fill_computed"] > 0
    assert_exact(answer, oracle("tiny-llama"), "shared")
    split.router.wait_for("decode")
    assert_exact(split.ask(text(100)), oracle("tiny-llama"), "shared")
