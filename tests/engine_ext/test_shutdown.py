# SPDX-License-Identifier: Apache-2.0
"""A stopping engine waits for running work and refuses the rest."""

import logging
import threading
import time
from types import SimpleNamespace

import pytest

from engine_ext.client.engine import ChunkEngine
from tests.engine_ext.fake_llm import FakeLLM, make_cache


class StoppableLLM(FakeLLM):
    errored = False
    given: float | None = -1.0

    def shutdown(self, timeout: float | None) -> None:
        self.given = timeout


def engine_with(*tiers: str) -> ChunkEngine:
    llm = StoppableLLM()
    return ChunkEngine(llm, make_cache(llm, tiers=dict.fromkeys(tiers, 1)))


def waiting(number: int) -> list[SimpleNamespace]:
    return [SimpleNamespace(key=key) for key in range(number)]


def test_it_waits_for_answers_and_for_what_is_to_be_stored():
    engine = engine_with("host", "file")
    writer = engine.cache.tier_writer
    writer.add(waiting(1))
    answering = engine.answering()
    answering.__enter__()
    stopping = threading.Thread(target=engine.shutdown, args=(60,))
    stopping.start()
    time.sleep(0.1)
    assert engine.is_stopping
    answering.__exit__(None, None, None)
    time.sleep(0.1)
    assert engine.llm.given == -1.0
    writer._waiting.clear()
    stopping.join(10)
    assert 0 < engine.llm.given < 60


@pytest.mark.parametrize("timeout", [0, 0.05])
def test_it_says_what_it_did_not_wait_for(timeout, caplog):
    engine = engine_with("file")
    engine.cache.tier_writer.add(waiting(3))
    with caplog.at_level(logging.WARNING), engine.answering(), engine.answering():
        engine.shutdown(timeout)
    assert engine.llm.given == 0
    assert [record.getMessage() for record in caplog.records] == [
        "stopping before 2 requests were answered (--shutdown-timeout)",
        "stopping before 3 segments were stored in tiers (--shutdown-timeout)",
    ]


def test_nothing_is_stored_that_would_go_with_the_process(caplog):
    engine = engine_with("host")
    engine.cache.tier_writer.add(waiting(3))
    engine.shutdown(60)
    assert caplog.records == []


def test_an_engine_that_has_died_is_not_waited_for_and_one_that_was_stopped_has_not_died():
    engine = engine_with()
    assert not engine.has_died
    engine.llm.errored = True
    with engine.answering():
        engine.shutdown(60)
    assert engine.has_died
    engine = engine_with()
    engine.shutdown(0)
    engine.llm.errored = True
    assert not engine.has_died
