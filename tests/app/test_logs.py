# SPDX-License-Identifier: Apache-2.0
"""Tessera's own log: one record per request with chunks, as text or JSON."""

import json
import logging

import pytest

from app.logs import LONGEST_MESSAGE, configure_logging
from app.settings import Settings
from cache.lease import ChunkStatus
from cache.positions.layout import PositionStrategy
from cache.report import Report, ReportedChunk, ReportedTokens
from engine_ext.client.reporting import log_finished

PACKAGES = ("app", "cache", "engine_ext", "kernels", "replicas")


@pytest.fixture(autouse=True)
def _unconfigured():
    loggers = [logging.getLogger(package) for package in PACKAGES]
    before = [(list(logger.handlers), logger.level, logger.propagate) for logger in loggers]
    yield
    for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


def make_report(**fields) -> Report:
    statuses = (ChunkStatus.HIT, ChunkStatus.HIT, ChunkStatus.FILLED)
    made = {
        "chunks": [ReportedChunk(index=0, id=None, key="k", tokens=2, status=status) for status in statuses],
        "mode": "chunked",
        "tokens": ReportedTokens(prompt=100, reused=70, computed=30, fill_computed=20),
        "timings_ms": {"plan": 0.21, "first_token": 9.87},
    }
    return Report.begun(PositionStrategy.SHARED, "system", 100).model_copy(update={**made, **fields})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "chunked, 3 chunks: 2 hit, 1 filled"),
        ({"mode": "full", "reason": "cache.mode is full", "chunks": []}, "full (cache.mode is full), 0 chunks"),
    ],
)
def test_a_request_is_one_readable_line_if_that_is_asked_for(capsys, fields, words):
    for level in ("WARNING", "INFO"):
        configure_logging(Settings(log_level=level))
        log_finished("r-1", make_report(**fields).to_dict())
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("tessera: 2")
    rest = "70 of 100 tokens reused; plan 0.2 ms, first token 9.9 ms"
    assert line.endswith(f" INFO request r-1: {words}; {rest}")


def test_all_packages_are_configured_and_others_loggers_left_alone():
    configure_logging(Settings(log_level="DEBUG"))
    assert {logging.getLogger(package).level for package in PACKAGES} == {logging.DEBUG}
    assert logging.getLogger("vllm").level != logging.DEBUG
    assert logging.getLogger().level == logging.WARNING


@pytest.mark.parametrize("log_format", ["text", "json"])
@pytest.mark.parametrize(
    "name", ["a\ntessera: 2026 CRITICAL b", "a\r\nb", "\x1b[2J", "\x9b2J", "a\u2028b", "\ud800", "x" * 10**6]
)
def test_what_clients_choose_is_no_line_of_the_log(capsys, log_format, name):
    configure_logging(Settings(log_level="INFO", log_format=log_format))
    logging.getLogger("app.x").warning("Storing %r or %s failed.", name, name)
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    assert said[:-1].isprintable()
    assert len(said) < 2 * LONGEST_MESSAGE
    assert "Storing" in said


def test_a_request_is_one_json_object(capsys):
    configure_logging(Settings(log_level="INFO", log_format="json"))
    log_finished("r-1", make_report().to_dict())
    (line,) = capsys.readouterr().err.splitlines()
    record = json.loads(line)
    assert (record["levelname"], record["name"]) == ("INFO", "engine_ext.client.reporting")
    assert {name: record[name] for name in ("request_id", "mode", "reason", "chunks", "tokens", "timings_ms")} == {
        "request_id": "r-1",
        "mode": "chunked",
        "reason": None,
        "chunks": {"total": 3, "hit": 2, "filled": 1},
        "tokens": {"prompt": 100, "reused": 70, "computed": 30, "fill_computed": 20},
        "timings_ms": {"plan": 0.21, "first_token": 9.87},
    }


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_traceback_is_kept(log_format, capsys):
    configure_logging(Settings(log_format=log_format))
    try:
        raise ValueError("broken")
    except ValueError:
        logging.getLogger("engine_ext.client.engine").exception("it failed")
    said = capsys.readouterr().err
    assert "it failed" in said
    traceback = json.loads(said)["exc_info"] if log_format == "json" else said
    assert "\nTraceback (most recent call last):\n" in f"\n{traceback}"
    assert "ValueError: broken" in traceback
