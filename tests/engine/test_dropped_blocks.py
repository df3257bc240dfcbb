# SPDX-License-Identifier: Apache-2.0
"""Servers of models with attention windows, of which vLLM drops blocks."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.cores import all_cores
from tests.engine.conftest import COMMON
from tests.engine.server import TesseraServer
from tests.engine.sharing import SMALL_STEPS
from tests.families import FAMILIES, MAX_POSITIONS
from tests.oracle import Oracle
from tests.support.exactness import assert_filled_hit_and_mixed_are_exact
from tests.support.parallel import (
    ENVIRONMENT,
    WORKERS,
    assert_lost_pages_are_refused,
    assert_many_requests_at_once_are_exact,
)
from tests.support.preemption import FEW_BLOCKS, assert_exact_under_preemption, assert_nothing_is_left_behind

pytestmark = pytest.mark.matrix

Text = Callable[[int], str]
# Prefills take several steps, between which vLLM drops blocks.
FLAGS = ("--dtype", "float32", *COMMON, "--max-model-len", str(MAX_POSITIONS), *SMALL_STEPS.args)


class Windowed(NamedTuple):
    """A server and the reference."""

    server: TesseraServer
    oracle: Oracle


MODELS = ["Gemma 3", "Mistral, sliding"]
"""With two tables of blocks, and with one whose layers all have windows."""


@contextmanager
def started(name: str, folder: Path, *flags: str, **environment: str) -> Iterator[Windowed]:
    model = FAMILIES[name].build(folder / "model")
    with ExitStack() as stack:
        server = TesseraServer(
            folder / "log", str(model), *FLAGS, *flags, environment={"VLLM_SERVER_DEV_MODE": "1", **environment}
        )
        stack.callback(server.stop)
        yield Windowed(server.wait_ready(), Oracle(model))


@pytest.fixture(scope="module", params=MODELS)
def windowed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Windowed]:
    with started(request.param, tmp_path_factory.mktemp("windowed")) as server:
        yield server


def test_filled_hit_and_mixed_many_at_once_and_lost_pages(windowed: Windowed, text: Text) -> None:
    assert_filled_hit_and_mixed_are_exact(windowed.server, windowed.oracle, text)
    assert_many_requests_at_once_are_exact(windowed.server, windowed.oracle, text, longest=180)
    assert_lost_pages_are_refused(windowed.server, windowed.oracle, text)


async def test_clients_that_leave_take_everything_with_them(windowed: Windowed, text: Text) -> None:
    await assert_nothing_is_left_behind(windowed.server, text, longest=450)


@pytest.mark.parametrize("name", MODELS)
def test_answers_stay_exact_under_preemption(name: str, text: Text, tmp_path: Path) -> None:
    with started(name, tmp_path, *FEW_BLOCKS, "--max-model-len", "512") as windowed:
        assert_exact_under_preemption(windowed.server, windowed.oracle, text)


@pytest.mark.parametrize("kind", WORKERS)
def test_two_workers(kind: str, text: Text, tmp_path: Path) -> None:
    with all_cores(), started("Gemma 3", tmp_path, *WORKERS[kind], **ENVIRONMENT) as windowed:
        assert_filled_hit_and_mixed_are_exact(windowed.server, windowed.oracle, text)
        assert_lost_pages_are_refused(windowed.server, windowed.oracle, text)
