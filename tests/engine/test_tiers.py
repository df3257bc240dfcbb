# SPDX-License-Identifier: Apache-2.0
"""Chunks that come from tiers are exact, and whatever becomes of a tier costs time only."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import COMMON
from tests.engine.server import TesseraServer
from tests.engine.test_exactness import ask, assert_exact, statuses
from tests.oracle import Oracle

STEPS = ("shared", "offset")
Text = Callable[[int], str]
StartServer = Callable[..., TesseraServer]


@pytest.fixture
def start(model_path: Callable[[str], Path], tmp_path: Path) -> Iterator[StartServer]:
    started: list[TesseraServer] = []

    def start_server(tiers: str, *flags: str, wait: bool = True, **kwargs: Any) -> TesseraServer:
        log = tmp_path / f"server-{len(started)}.log"
        arguments = (str(model_path("tiny-llama")), "--dtype", "float32", *COMMON)
        server = TesseraServer(log, *arguments, "--chunk-cache-tiers", tiers, *flags, **kwargs)
        started.append(server)
        return server.wait_ready() if wait else server

    yield start_server
    for server in started:
        server.stop()


def archived(server: TesseraServer) -> dict[str, Any]:
    """Stats once everything has been stored."""
    deadline = time.monotonic() + 60
    while (stats := server.stats())["occupancy"]["archive_waiting"]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return stats


def to_sleep(server: TesseraServer) -> None:
    """Empties the pool of all that is in a tier."""
    archived(server)
    slept = server.post("/v1/cache/sleep", {"idle_s": 0})
    assert slept["segments"] > 0
    assert server.stats()["occupancy"]["segments"] == 0


def origins(response: dict[str, Any]) -> list[str | None]:
    return [chunk.get("origin") or chunk["status"] for chunk in response["cache"]["chunks"]]


def test_chunks_are_exact_from_whatever_tier_and_in_mixtures(
    start: StartServer, tmp_path: Path, oracle: Callable[[str], Oracle], text: Text
) -> None:
    """Of host memory, a directory, the pool and computing; with system segments long and short."""
    folder = tmp_path / "kv"
    server = start(f"host://?size=600KiB,file://{folder}?size=1GiB", "--chunk-cache-page-tokens", "16")
    a, b, c, d, e = (text(n) for n in (100, 37, 260, 64, 150))
    for strategy in ("shared", "offset"):
        assert_exact(ask(server, strategy, [a, b, c, d], "What?"), oracle("tiny-llama"), strategy)
    to_sleep(server)
    first = ask(server, "shared", [d, a, c], "Which?")  # 600 KiB hold the last of them
    assert set(origins(first)) <= {"file", "host"}
    assert_exact(first, oracle("tiny-llama"), "shared")
    mixed = ask(server, "offset", [b, e, a], "Which?")
    assert origins(mixed)[1:] == ["filled", "hit"]
    assert origins(mixed)[0] in ("file", "host")
    assert_exact(mixed, oracle("tiny-llama"), "offset")
    to_sleep(server)
    loaded = set()
    for chunks in ([a, b, c, d, e], [e, d], [a]):
        again = ask(server, "shared", chunks, "Which?")
        loaded |= set(origins(again))
        assert_exact(again, oracle("tiny-llama"), "shared")
    assert {"file", "host"} <= loaded
    counted = server.stats()["counters"]
    assert counted["loaded_bytes"]["file"] > 0
    assert counted["fills"]["loaded"] > 0
    assert again["cache"]["tokens"]["reused"] > 0


def test_after_kill_9_the_first_request_finds_everything_that_was_stored(
    start: StartServer, tmp_path: Path, oracle: Callable[[str], Oracle], text: Text
) -> None:
    tiers = f"file://{tmp_path}/kv?size=1GiB"
    server, chunks = start(tiers), [text(300), text(120)]
    ask(server, "shared", chunks, "What?")
    archived(server)
    os.killpg(server.process.pid, signal.SIGKILL)
    server.process.wait()
    again = start(tiers)
    answer = ask(again, "shared", chunks[::-1], "What?")
    assert origins(answer) == ["file", "file"]
    assert answer["cache"]["tokens"]["computed"] == len(answer["cache"]["segments"][-1]["token_ids"])
    assert_exact(answer, oracle("tiny-llama"), "shared")


def test_two_servers_on_one_directory_need_nothing_else(
    start: StartServer, tmp_path: Path, oracle: Callable[[str], Oracle], text: Text
) -> None:
    tiers = f"file://{tmp_path}/kv?size=1GiB"
    one, two = start(tiers), start(tiers)
    chunks = [text(300), text(120)]
    ask(one, "shared", chunks, "What?")
    archived(one)
    answer = ask(two, "offset", chunks, "What?")
    assert origins(answer) == ["file", "file"]
    assert_exact(answer, oracle("tiny-llama"), "offset")
    key = answer["cache"]["chunks"][0]["key"]
    assert two.client.delete(f"/v1/rag/chunks/{key}").status_code == 200
    assert not list((tmp_path / "kv").rglob(f"{key}*"))


def test_damaged_files_are_computed_anew_and_quarantined(
    start: StartServer, tmp_path: Path, oracle: Callable[[str], Oracle], text: Text
) -> None:
    folder = tmp_path / "kv"
    server = start(f"file://{folder}?size=1GiB")
    chunks = [text(200) for _ in range(6)]
    ask(server, "shared", chunks, "What?", system="S")
    to_sleep(server)
    files = {path.name.split(".")[0]: path for path in folder.glob("??/*.safetensors")}
    keys = [str(chunk["key"]) for chunk in ask(server, "shared", chunks, "What?", system="S")["cache"]["chunks"]]
    to_sleep(server)
    flipped, cut, empty, foreign, formatted, _ = (files[key] for key in keys)
    change(flipped, lambda data: data[:-50] + bytes([data[-50] ^ 4]) + data[-49:])
    change(cut, lambda data: data[: len(data) // 2])
    change(empty, lambda _: b"")
    change(foreign, lambda _: files[keys[5]].read_bytes())
    change(formatted, lambda data: data.replace(b"tessera-kv-1", b"tessera-kv-0"))
    answer = ask(server, "shared", chunks, "What?", system="S")
    assert sorted(origins(answer)) == ["file"] + ["filled"] * 5
    assert_exact(answer, oracle("tiny-llama"), "shared")
    assert server.stats()["counters"]["tiers"]["file"]["corrupt"] == 5
    assert {path.name.split(".")[0] for path in (folder / "quarantine").iterdir()} == set(keys[:5])
    to_sleep(server)
    again = ask(server, "shared", chunks, "What?", system="S")
    assert origins(again) == ["file"] * 6
    assert_exact(again, oracle("tiny-llama"), "shared")


def change(path: Path, how: Callable[[bytes], bytes]) -> None:
    path.write_bytes(how(path.read_bytes()))


def test_a_full_disk_and_one_that_can_not_be_written_to_cost_nothing_but_the_tier(
    start: StartServer, tmp_path: Path, oracle: Callable[[str], Oracle], text: Text
) -> None:
    folder = tmp_path / "kv"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(folder)], check=False).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        server, chunks = start(f"file://{folder}?size=1GiB"), [text(300), text(200)]
        answer = ask(server, "shared", chunks, "What?")
        assert statuses(answer) == ["filled"] * 2
        assert archived(server)["counters"]["tiers"]["file"]["store_failed"] >= 1
        assert not list(folder.rglob("*.tmp"))
        assert_exact(ask(server, "shared", chunks[::-1], "What?"), oracle("tiny-llama"), "shared")
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        assert_exact(ask(server, "shared", [text(90), *chunks], "What?"), oracle("tiny-llama"), "shared")
        archived(server)
        assert server.stop() == 0
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_file_system_that_hangs_is_waited_for_once(
    start: StartServer, tmp_path: Path, oracle: Callable[[str], Oracle], text: Text
) -> None:
    """A FIFO where the file should be: whoever opens it waits for somebody to write to it."""
    folder = tmp_path / "kv"
    server = start(f"file://{folder}?size=1GiB", "--chunk-cache-tier-timeout", "0.3")
    chunks = [text(200) for _ in range(4)]
    ask(server, "shared", chunks, "What?", system="S")
    to_sleep(server)
    for path in folder.glob("??/*.safetensors"):
        path.unlink()
        os.mkfifo(path)
    answer = ask(server, "shared", chunks, "What?", system="S")
    assert statuses(answer) == ["filled"] * 4
    assert_exact(answer, oracle("tiny-llama"), "shared")
    happened = server.stats()["counters"]["tiers"]["file"]
    assert happened["timeout"] == 1
    assert happened["suspended"] >= 3
    answered = time.monotonic()
    assert_exact(ask(server, "shared", [text(50), *chunks], "What?", system="S"), oracle("tiny-llama"), "shared")
    assert server.process.poll() is None, answered


def test_a_wrong_configuration_stops_the_start_in_one_line(start: StartServer) -> None:
    server = start("file:///proc/nowhere?size=1GiB", wait=False)
    assert server.process.wait(120) == 2
    (said,) = [line for line in server.log.read_text().splitlines() if line.startswith("tessera: ")]
    assert "/proc/nowhere: No such file or directory" in said
