# SPDX-License-Identifier: Apache-2.0
"""Memory: what is judged, and a measurement of processes without a model."""

import json

import pytest

from benchmarks import memory
from benchmarks.memory import judged, main, server_bytes
from benchmarks.servers import Servers

MIB = 1 << 20


def result(allocated=1024, measured=1000, late=2000):
    return {
        "pool": {"configured": 1024 * MIB, "allocated": allocated * MIB},
        "filled": {"expected": 1000 * MIB, "measured": measured * MIB},
        "processes": {"early": 2000 * MIB, "late": late * MIB},
    }


@pytest.mark.parametrize(
    ("fields", "too_much"),
    [
        ({}, []),
        ({"allocated": 1000}, ["pool allocated"]),
        ({"measured": 975}, ["pool filled"]),
        ({"measured": 1030}, ["pool filled"]),
        ({"late": 2059}, []),
        ({"late": 2061}, ["processes"]),
        ({"late": 1500}, []),
    ],
)
def test_what_is_too_much(fields, too_much):
    missed = [name for name, share, bound in judged(result(**fields)) if share > bound]
    assert [name.split(",")[0] for name in missed] == too_much


@pytest.fixture
def small(monkeypatch, small_processes):
    monkeypatch.setattr(memory, "_BATCH", 4)


async def test_memory_is_that_of_the_servers_processes(small, tmp_path):
    async with Servers("model", (), tmp_path) as servers:
        server = await servers.get("tessera")
        assert MIB < server_bytes(server) < 1 << 30
    assert server_bytes(server) == 0


def test_a_run_writes_its_numbers(small, tmp_path, capsys):
    file = tmp_path / "memory.json"
    main_with = ["--requests", "8", "--pool", "1MiB", "--json", str(file)]
    assert main(main_with) in (0, 1)  # a server without a model has no pool in its memory
    assert capsys.readouterr().out.count("at most") == 3
    written = json.loads(file.read_text())
    assert written["pool"]["configured"] == MIB
    assert written["processes"]["late"] > 0
