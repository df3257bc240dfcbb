# SPDX-License-Identifier: Apache-2.0
"""Real servers for tests, accessed over HTTP."""

import json
import os
import re
import signal
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from machine.server_process import ServerProcess, group_members
from tests.processes import kill_group
from tests.support.waiting import until

_COVERED = ("--shutdown-timeout", "30") if "COVERAGE_PROCESS_CONFIG" in os.environ else ()
"""With `COVERAGE=1` the engine ends by itself: by default vLLM kills it, and the lines it has reached are lost."""
_UNDER_WAY = ("leases", "running_fills", "segments_filling", "segments_detached")


class TesseraServer(ServerProcess):
    """A server with requests for tests; `stats()` fails if the manager's books are inconsistent."""

    def __init__(self, log: Path, *arguments: str, **options: Any) -> None:
        super().__init__(log, *arguments, *_COVERED, **options)

    def post(self, path: str, body: dict[str, Any], status: int = 200) -> dict[str, Any]:
        response = self.client.post(path, json=body)
        assert response.status_code == status, response.text
        return response.json()

    def chat(self, **body: Any) -> dict[str, Any]:
        return self.post("/v1/rag/chat", body)

    def ingest(self, chunks: Sequence[Any], **fields: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """The lines of `POST /v1/rag/chunks`, and its summary separately."""
        response = self.client.post("/v1/rag/chunks", json={"chunks": chunks, **fields})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"] == "application/x-ndjson"
        *lines, last = map(json.loads, response.text.splitlines())
        return lines, last["summary"]

    def get(self, path: str, status: int = 200, **params: Any) -> dict[str, Any]:
        response = self.client.get(path, params=params)
        assert response.status_code == status, response.text
        return response.json()

    def stats(self) -> dict[str, Any]:
        stats = self.client.get("/v1/cache/stats").json()
        assert "integrity" not in (stats["reason"] or ""), stats
        return stats

    def occupancy(self) -> dict[str, Any]:
        """Occupancy, for polling: without the check of the books, which would keep the server busy."""
        return self.client.get("/v1/cache/stats", params={"check": False}).json()["occupancy"]

    def wait_idle(self) -> dict[str, Any]:
        """Waits until no lease, fill or engine request is left; returns the stats."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            stats = self.stats()
            held = stats.get("occupancy", {})
            if not any(held.get(name) for name in _UNDER_WAY) and not self.running_requests():
                return stats
            time.sleep(0.1)
        raise AssertionError(f"not idle: {stats}, {self.running_requests()} requests in the engine")

    def end(self, sent: signal.Signals = signal.SIGTERM) -> None:
        """Stops the server by a signal, which must end all of its processes."""
        group = self.process.pid
        assert len(group_members(group)) > 1
        assert self.stop(sent) == 0
        wait_until_gone(group)
        said = [line for line in self.log.read_text().splitlines() if line.startswith("tessera: ")]
        assert said[-1] == "tessera: stopped"

    def running_requests(self) -> float:
        return self.metric("vllm:num_requests_running", "vllm:num_requests_waiting")

    def metric(self, *names: str) -> float:
        """The sum of all samples of these names."""
        lines = self.client.get("/metrics").text.splitlines()
        values = [float(line.rsplit(" ", 1)[1]) for line in lines if re.match(r"[^{ ]*", line)[0] in names]
        assert values, f"no metric {names}"
        return sum(values)

    def statuses(self) -> list[str]:
        """Statuses of each request's chunks, as the log has them with ``--log-level INFO``: ``1 hit, 2 filled``."""
        return re.findall(r" INFO request .*? chunks: (.*?);", self.log.read_text())


class ServerPool:
    """Starts servers on demand, about 20 s each, and keeps the most recent ones running."""

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self._folder = folder
        self._keep = keep
        self._running: OrderedDict[tuple[Any, ...], TesseraServer] = OrderedDict()

    def get(self, *arguments: str, environment: Mapping[str, str] | None = None) -> TesseraServer:
        key = *arguments, *sorted((environment or {}).items())
        server = self._running.pop(key, None)
        if server is None:
            while len(self._running) >= self._keep:
                self._running.popitem(last=False)[1].stop()
            log = self._folder / f"server-{len(list(self._folder.iterdir()))}.log"
            server = TesseraServer(log, *arguments, environment=environment).wait_ready()
        self._running[key] = server
        return server

    def running(self) -> list[TesseraServer]:
        return list(self._running.values())

    def close(self) -> None:
        while self._running:
            self._running.popitem()[1].stop()


def wait_until_gone(group: int) -> None:
    """Waits until a server's process group is empty; vLLM's own process watch takes five minutes."""
    try:
        until(lambda: not group_members(group), 120)
    finally:
        kill_group(group)


def shared_memory(group: int) -> set[Path]:
    """Files in /dev/shm that a server's process group has open."""
    maps = (Path(f"/proc/{pid}/maps").read_text() for pid in group_members(group))
    lines = (line for each in maps for line in each.splitlines() if " /dev/shm/" in line)
    return {Path(line.split(maxsplit=5)[5]) for line in lines if not line.endswith(" (deleted)")}


def token_logprobs(response: dict[str, Any]) -> list[float]:
    return [entry["logprob"] for entry in response["choices"][0]["logprobs"]["content"]]


def stream_events(server: TesseraServer, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """All JSON events of a streamed response; checks that it ends with [DONE]."""
    with server.client.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        lines = [line[6:] for line in response.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def engine_core(server: TesseraServer) -> psutil.Process:
    return named("EngineCore", psutil.Process(server.process.pid).children())


def named(name: str, processes: list[psutil.Process]) -> psutil.Process:
    """The process with this name in vLLM's process title."""
    return next(each for each in processes if name in each.name() or name in " ".join(each.cmdline()))
