# SPDX-License-Identifier: Apache-2.0
"""Tessera's own log: one record per request with chunks, as text or JSON."""

import json
import logging

import pytest

from app.logs import configure_logging
from app.settings import Settings
from cache.lease import ChunkStatus
from cache.positions.layout import PositionStrategy
from cache.report import Report, ReportedChunk, ReportedTokens
from engine_ext.client.reporting import log_finished

PACKAGES = ("app", "cache", "engine_ext", "kernels")


@pytest.fixture(autouse=True)
def _unconfigured():
    loggers = [logging.getLogger(package) for package in PACKAGES]
    before = [(list(logger.handlers), logger.level, logger.propagate) for logger in loggers]
    yield
    for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


def make_report(**fields) -> Report:
    report = Report.begun(PositionStrategy.SHARED, "system", 100)
    statuses = (ChunkStatus.HIT, ChunkStatus.HIT, ChunkStatus.FILLED)
    chunks = [ReportedChunk(index=0, id=None, key="k", tokens=2, status=status) for status in statuses]
    tokens = ReportedTokens(prompt=100, reused=70, computed=30, fill_computed=20)
    timings_ms = {"plan": 0.21, "first_token": 9.87}
    return report.model_copy(
        update={"chunks": chunks, "mode": "chunked", "tokens": tokens, "timings_ms": timings_ms, **fields}
    )


def test_requests_are_not_logged_by_default(capsys):
    configure_logging(Settings())
    log_finished("r-1", make_report().to_dict())
    assert capsys.readouterr().err == ""


def test_a_request_is_one_readable_line(capsys):
    configure_logging(Settings(log_level="INFO"))
    log_finished("r-1", make_report().to_dict())
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("tessera: 2")
    assert line.endswith(
        " INFO request r-1: chunked, 3 chunks: 2 hit, 1 filled; 70 of 100 tokens reused; "
        "plan 0.2 ms, first token 9.9 ms"
    )


def test_a_request_in_full_attention_says_why(capsys):
    configure_logging(Settings(log_level="INFO"))
    log_finished("r-1", make_report(mode="full", reason="cache.mode is full", chunks=[]).to_dict())
    assert "request r-1: full (cache.mode is full), 0 chunks; " in capsys.readouterr().err


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
    err = capsys.readouterr().err
    assert "it failed" in err
    assert "ValueError: broken" in err
    assert log_format == "text" or "ValueError: broken" in json.loads(err)["exc_info"]


def test_others_loggers_are_left_alone():
    configure_logging(Settings(log_level="DEBUG"))
    assert logging.getLogger("vllm").level != logging.DEBUG
    assert logging.getLogger().level == logging.WARNING
