# SPDX-License-Identifier: Apache-2.0
"""`tessera cluster`: Redis, replicas and a router on one machine, as in docker/compose.yaml."""

import argparse
import functools
import json
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final

from app import cluster
from app.models.default_model import DEFAULT_MODEL_FLAGS, default_model
from app.models.packaged_models import PackagedModelError, local_model
from machine.folders import tessera_home
from machine.followed import echoed
from machine.progress import progress, say
from machine.redis_process import NoRedisError, local_redis
from machine.server_process import ServerProcess, ended_by_signals, free_port, last_words
from replicas.registry import Role

ALERTS: Final = Path(cluster.__file__).with_name("alerts.yml")
_ROUTE = ("app.cli", "route")
_JOIN_S = 30
_RESTART_S: Final = (1.0, 60.0)
"""Pause before a replica is restarted: the first, doubled after each early end, and the longest."""
_CURL = """\
curl -s {url}/v1/rag/chat -H 'content-type: application/json' -d '{{
    "chunks": ["The access code of Falcon is 7342."], "question": "What is the access code of Falcon?"}}'"""


class ClusterError(Exception):
    """A part of the cluster did not start; the message says which."""


def main(argv: Sequence[str]) -> int:
    """Runs until Ctrl-C, restarting replicas. Returns 2 if the cluster does not start, 1 if the router ends."""
    args, flags = _parser().parse_known_args(argv)
    try:
        replicas = named_replicas(args.replicas, args.prefill, args.decode)
    except ValueError as error:
        say(str(error))
        return 2
    try:
        with ended_by_signals(), ExitStack() as stack:
            parts = _start(args, flags, replicas, stack)
            _tell(parts)
            _watch(parts)
    except (ClusterError, NoRedisError, PackagedModelError) as error:
        say(str(error))
        return 2
    except KeyboardInterrupt:
        say("stopped")
        return 130
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tessera cluster",
        description="Run Redis, replicas, a router, and Prometheus if it is installed, on this machine. Other flags "
        "go to every replica, as to tessera serve.",
    )
    parser.add_argument("model", nargs="?", help="default: SmolLM2, downloaded first")
    parser.add_argument("--replicas", type=_positive, help="number of replicas (default: 2)")
    parser.add_argument("--prefill", type=_positive, help="instead: replicas that compute chunks for those that decode")
    parser.add_argument("--decode", type=_positive, help="and replicas that decode, to which the router sends requests")
    parser.add_argument("--port", type=int, default=8080, help="port of the router (default: %(default)s)")
    parser.add_argument("--registry", help="URL of a running Redis (default: one is started)")
    return parser


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise ValueError
    return number


class Part:
    """One process of the cluster; a restart keeps its address."""

    def __init__(self, name: str, start: Callable[[int | None], ServerProcess]) -> None:
        """``start`` starts the process at the given port, or at a free one."""
        self.name = name
        self._start = start
        self._pause = _RESTART_S[0]
        self._started = time.monotonic()
        self._start_again_at: float | None = None
        self.server = start(None)

    def wait_ready(self) -> None:
        """Waits until the process answers; raises :class:`ClusterError` if it ends first."""
        log = self.server.log
        try:
            self.server.wait_ready()
        except (RuntimeError, TimeoutError) as error:
            words = last_words(log).removeprefix("tessera: ")
            raise ClusterError(f"{self.name} didn't start: {words}; its log is {log}") from error

    def ending(self) -> str | None:
        """A report of how the process ended; ``None`` while it runs."""
        process = self.server.process
        return None if process.poll() is None else f"{self.name} has ended with {process.returncode}"

    def watch(self) -> None:
        """Restarts the process after a pause if it has ended."""
        if (ending := self.ending()) is None:
            return
        now = time.monotonic()
        if self._start_again_at is None:
            if now - self._started > _RESTART_S[1]:
                self._pause = _RESTART_S[0]
            self._start_again_at = now + self._pause
            say(f"{ending}; its log is {_kept(self.server.log)}")
        elif now >= self._start_again_at:
            say(f"starting {self.name} again")
            self._pause = min(2 * self._pause, _RESTART_S[1])
            self._started, self._start_again_at = now, None
            self.stop()
            self.server = self._start(self.server.port)

    def stop(self) -> None:
        """Ends the process."""
        with suppress(subprocess.TimeoutExpired):  # the process was killed
            self.server.stop()


def named_replicas(replicas: int | None, prefill: int | None, decode: int | None) -> dict[str, Role]:
    """The replicas' roles by name; raises ``ValueError`` for numbers that don't go together."""
    if prefill is None and decode is None:
        return {f"replica-{number}": "both" for number in range(1, (replicas or 2) + 1)}
    if prefill is None or decode is None or replicas is not None:
        raise ValueError("--prefill and --decode go together, and instead of --replicas")
    counts: dict[Role, int] = {"prefill": prefill, "decode": decode}
    return {f"{role}-{number}": role for role, count in counts.items() for number in range(1, count + 1)}


def _start(args: argparse.Namespace, flags: list[str], replicas: Mapping[str, Role], stack: ExitStack) -> list[Part]:
    """Starts replicas, then the router, and waits until all are ready; ``stack`` ends them."""
    registry = ("--registry", args.registry or stack.enter_context(local_redis()))  # before any download
    if args.model is None:
        args.model, flags = default_model(), [*DEFAULT_MODEL_FLAGS, *flags]
    args.model = local_model(args.model)
    folder = tessera_home() / "cluster"
    folder.mkdir(parents=True, exist_ok=True)
    secret = {"TESSERA_PEER_SECRET": os.environ.get("TESSERA_PEER_SECRET") or secrets.token_urlsafe()}

    def start_replica(name: str, role: Role, cores: list[int], port: int | None) -> ServerProcess:
        arguments = (args.model, *flags, *registry, "--replica-name", name, "--role", role)
        # NIXL's default is one port for all.
        environment = {**secret, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
        server = ServerProcess(folder / f"{name}.log", *arguments, port=port, environment=environment)
        os.sched_setaffinity(server.process.pid, cores)
        return server

    def start_router(port: int | None) -> ServerProcess:
        address = port or args.port
        return ServerProcess(folder / "router.log", *registry, port=address, environment=secret, serve=_ROUTE)

    parts = []
    all_shares = shares(sorted(os.sched_getaffinity(0)), len(replicas))
    for (name, role), cores in zip(replicas.items(), all_shares, strict=True):
        parts.append(Part(name, functools.partial(start_replica, name, role, cores)))
        stack.callback(parts[-1].stop)
    parts.append(Part("router", start_router))
    stack.callback(parts[-1].stop)
    with progress(f"starting {len(replicas)} replicas and a router (logs are in {folder})"), ExitStack() as echoes:
        for part in parts:
            echoes.enter_context(echoed(part.server.log, f"{part.name}: "))
        for part in parts:
            part.wait_ready()
        _wait_for_all(parts[-1].server, len(replicas))
    _start_prometheus(folder, {part.name: part.server.port for part in parts}, stack)
    return parts


def _kept(log: Path) -> Path:
    """Keeps a log beside the next one."""
    return log.replace(log.with_suffix(".previous.log"))


def _wait_for_all(router: ServerProcess, replicas: int) -> None:
    deadline = time.monotonic() + _JOIN_S
    while len(router.client.get("/v1/cluster").json()["replicas"]) < replicas:
        if time.monotonic() > deadline:
            raise ClusterError(f"the router does not see all replicas; its log is {router.log}")
        time.sleep(0.1)


def shares(cores: list[int], replicas: int) -> list[list[int]]:
    """Cores for each replica, disjoint if possible: shared cores slow engines down."""
    if len(cores) < replicas:
        return [cores] * replicas
    return [cores[i * len(cores) // replicas : (i + 1) * len(cores) // replicas] for i in range(replicas)]


def _start_prometheus(folder: Path, ports: dict[str, int], stack: ExitStack) -> None:
    if (binary := shutil.which("prometheus")) is None:
        say("Prometheus is not installed; not started")
        return
    port, config = free_port(), folder / "prometheus.yml"
    # JSON is valid YAML.
    config.write_text(json.dumps(prometheus_config(ports), indent=1))
    flags = [f"--config.file={config}", f"--storage.tsdb.path={folder}/prometheus"]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [binary, *flags, f"--web.listen-address=127.0.0.1:{port}"],
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    stack.callback(process.wait)
    stack.callback(process.terminate)
    say(f"Prometheus at http://127.0.0.1:{port}")


def prometheus_config(ports: dict[str, int]) -> dict[str, object]:
    """docker/prometheus.yml for processes of this machine."""
    jobs = {
        job: [
            {"targets": [f"127.0.0.1:{port}"], "labels": {"instance": name}}
            for name, port in ports.items()
            if (name == "router") == (job == "router")
        ]
        for job in ("replica", "router")
    }
    return {
        "global": {"scrape_interval": "15s", "evaluation_interval": "15s"},
        "rule_files": [str(ALERTS)],
        "scrape_configs": [{"job_name": job, "static_configs": targets} for job, targets in jobs.items()],
    }


def _tell(parts: list[Part]) -> None:
    for part in parts:
        say(f"{part.name} at {part.server.url}")
    router = parts[-1].server.url
    say(f"replicas and routing decisions: {router}/v1/cluster; Ctrl-C stops. Try:")
    print(_CURL.format(url=router), flush=True)


def _watch(parts: list[Part]) -> None:
    """Restarts replicas that have ended; returns once the router has ended."""
    *replicas, router = parts
    while (ending := router.ending()) is None:
        for replica in replicas:
            replica.watch()
        time.sleep(0.5)
    say(f"the {ending}; its log is {router.server.log}")
