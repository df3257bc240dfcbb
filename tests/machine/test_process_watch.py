# SPDX-License-Identifier: Apache-2.0
"""Processes end after their parent is killed; real processes, without an engine."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from uuid import uuid4

import pytest

from engine_ext.start import plugin
from machine import process_watch as orphans
from machine.server_process import ROOT, python_path
from tests.engine.server import wait_until_gone
from tests.processes import started

PARENT = """
import multiprocessing, sys
from tests.machine.test_process_watch import child
if __name__ == "__main__":
    multiprocessing.get_context(sys.argv[1]).Process(target=child, args=(sys.argv[2],)).start()
"""
STARTED = """
import time
from machine.process_watch import end_with_starter
end_with_starter()
print("ready", flush=True)
time.sleep(600)
"""
STARTER = """
import os, subprocess, sys
from machine.process_watch import starter_environment
subprocess.run([sys.executable, "-c", sys.argv[1]], env={**os.environ, **starter_environment()})
"""


def child(kind: str) -> None:
    """A process of an engine or another program."""
    if kind == "with its own":  # like a new worker of vLLM, which imports for half a minute
        multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,)).start()
    if kind in ("stubborn", "with its own"):
        orphans.GRACE_S = 0.1
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if kind != "foreign":
        orphans.mark_engine()
    orphans.end_with_parent()
    print("watched" if any(thread.name == "orphan" for thread in threading.enumerate()) else "alone", flush=True)
    time.sleep(600)


@contextmanager
def killed(*arguments: str) -> Iterator[tuple[str, int]]:
    """The first line of a process's child, and the group of both; the process has been killed."""
    environment = {**os.environ, "PYTHONPATH": python_path()}
    environment.pop("_TESSERA_ENGINE", None)  # left by an engine in this process
    command = [sys.executable, "-c", *arguments]
    with started(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE) as parent:
        said = parent.stdout.readline().decode().strip()
        parent.kill()
        parent.wait()
        yield said, parent.pid


@pytest.mark.parametrize("kind", ["orderly", "stubborn", "with its own"])
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_an_engines_process_ends_with_its_parent(method, kind):
    with killed(PARENT, method, kind) as (said, group):
        assert said == "watched"
        wait_until_gone(group)


def test_processes_of_other_programs_are_left_alone():
    with killed(PARENT, "fork", "foreign") as (said, _):
        assert said == "alone"


def test_a_command_ends_with_the_process_that_started_it():
    with killed(STARTER, STARTED) as (said, group):
        assert said == "ready"
        wait_until_gone(group)


def test_nothing_is_watched_over_that_nobody_asked_for(monkeypatch):
    monkeypatch.delenv("_TESSERA_STARTER", raising=False)
    monkeypatch.setenv("_TESSERA_ENGINE", "1")
    orphans.end_with_starter()
    assert multiprocessing.parent_process() is None
    orphans.end_with_parent()
    assert not any(thread.name == "orphan" for thread in threading.enumerate())


@pytest.mark.parametrize(("given", "then"), [("a,b", "a,b,tessera"), ("tessera", "tessera"), (None, None)])
def test_a_list_of_plugins_gets_this_one(given, then, monkeypatch):
    monkeypatch.setenv("_TESSERA_ENGINE", "")
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    if given is not None:
        monkeypatch.setenv("VLLM_PLUGINS", given)
    orphans.mark_engine()
    assert os.environ.get("VLLM_PLUGINS") == then


def test_vllm_finds_the_plugin():
    """Fails if pyproject.toml changed after the installation; `make setup` repeats it."""
    found = entry_points(group="vllm.general_plugins", name=orphans.PLUGIN)
    assert {entry.load() for entry in found} == {plugin.load}


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="shared memory has no folder here")
def test_shared_memory_loses_its_names(monkeypatch):
    """As CPU workers name it; another engine's keeps its names."""
    own, other = f"vllm_dist_{uuid4().hex}", f"vllm_dist_{uuid4().hex}"
    paths = [Path(f"/dev/shm/{identity}-tp:0-[0-1]-cpushm_{rank}") for identity in (own, other) for rank in (0, 1)]
    monkeypatch.setenv("VLLM_DIST_IDENT", own)
    try:
        for path in paths:
            path.touch()
        orphans.unlink_shared_memory()
        assert [path.exists() for path in paths] == [False, False, True, True]
    finally:
        for path in paths:
            path.unlink(missing_ok=True)
