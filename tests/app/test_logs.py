# SPDX-License-Identifier: Apache-2.0
"""Tessera's own log: one record per request with chunks, as text or JSON."""

import asyncio
import json
import logging

import pytest

from app.logs import LONGEST_MESSAGE, configure_logging
from app.settings import Settings
from cache.lease import ChunkStatus
from cache.positions.layout import PositionStrategy
from cache.report import Report, ReportedChunk, ReportedTokens
from cache.segments.holdings import Holdings
from engine_ext.client.reporting import log_finished
from replicas.publisher import Publisher
from replicas.registry import InProcessRegistry, RegistryError, Replica

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


def test_a_traceback_keeps_its_lines(capsys):
    configure_logging(Settings())
    try:
        raise ValueError("x")
    except ValueError:
        logging.getLogger("app.x").exception("It failed")
    assert capsys.readouterr().err.splitlines()[1] == "Traceback (most recent call last):"


async def test_a_registry_that_fails_is_told(capsys):
    configure_logging(Settings())
    registry = InProcessRegistry()

    async def fails(_):
        raise RegistryError("Redis: DB index is out of range")

    registry.beat = fails
    replica = Replica("00" * 6, "a", "http://a", (), "")
    publishing = asyncio.create_task(Publisher(registry, lambda _: replica, Holdings()).run())
    await asyncio.sleep(0.01)
    publishing.cancel()
    assert "WARNING registry lost: Redis: DB index is out of range" in capsys.readouterr().err


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
