# SPDX-License-Identifier: Apache-2.0
"""`tessera cluster`: Redis, replicas and a router as processes of one machine, as docker/compose.yaml has them."""

import argparse
import json
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final

from app.models.default_model import DEFAULT_MODEL_FLAGS, default_model
from tools.folders import tessera_home
from tools.progress import progress, say
from tools.redis_process import NoRedisError, local_redis
from tools.server_process import ROOT, ServerProcess, ended_by_signals, free_port, last_words

ALERTS: Final = ROOT / "docs" / "alerts.yml"
_ROUTE = ("app.cli", "route")
_JOIN_S = 30
_CURL = """\
curl -s {url}/v1/rag/chat -H 'content-type: application/json' -d '{{
    "chunks": ["The access code of Falcon is 7342."], "question": "What is the access code of Falcon?"}}'"""


class ClusterError(Exception):
    """The cluster can't be started, or has lost a part; the message says which."""


def main(argv: Sequence[str]) -> int:
    """Runs until Ctrl-C; returns the exit code: 2 if it can't be started, 1 if a part of it ends."""
    args, flags = _parser().parse_known_args(argv)
    try:
        with ended_by_signals(), ExitStack() as stack:
            parts = _start(args, flags, stack)
            _tell(parts)
            _watch(parts)
    except (ClusterError, NoRedisError) as error:
        say(str(error))
        return 2
    except KeyboardInterrupt:
        say("stopped")
        return 130
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tessera cluster",
        description="Redis, replicas, a router, and Prometheus if it is installed, on this machine. Flags that are not "
        "listed here go to every replica, as to tessera serve.",
    )
    parser.add_argument("model", nargs="?", help="default: SmolLM2, downloaded first")
    parser.add_argument("--replicas", type=_positive, default=2, help="how many (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8080, help="of the router (default: %(default)s)")
    parser.add_argument("--registry", help="a Redis that runs already (default: one is started)")
    return parser


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise ValueError
    return number


def _start(args: argparse.Namespace, flags: list[str], stack: ExitStack) -> dict[str, ServerProcess]:
    """The processes by name, all of them ready; `stack` ends them."""
    if args.model is None:
        args.model, flags = default_model(), [*flags, *DEFAULT_MODEL_FLAGS]
    folder = tessera_home() / "cluster"
    folder.mkdir(parents=True, exist_ok=True)
    registry = ("--registry", args.registry or stack.enter_context(local_redis()))
    secret = {"TESSERA_PEER_SECRET": os.environ.get("TESSERA_PEER_SECRET") or secrets.token_urlsafe()}
    parts = {}
    for number, cores in enumerate(shares(sorted(os.sched_getaffinity(0)), args.replicas), 1):
        name = f"replica-{number}"
        own = ("--replica-name", name)
        parts[name] = ServerProcess(folder / f"{name}.log", args.model, *flags, *registry, *own, environment=secret)
        stack.callback(_stop, parts[name])
        os.sched_setaffinity(parts[name].process.pid, cores)
    parts["router"] = ServerProcess(folder / "router.log", *registry, port=args.port, serve=_ROUTE)
    stack.callback(_stop, parts["router"])
    with progress(f"starting {args.replicas} replicas and a router; logs are in {folder}"):
        for name, part in parts.items():
            _wait_ready(name, part)
        _wait_for_all(parts["router"], args.replicas)
    _start_prometheus(folder, parts, stack)
    return parts


def _wait_ready(name: str, part: ServerProcess) -> None:
    try:
        part.wait_ready()
    except (RuntimeError, TimeoutError) as error:
        words = last_words(part.log).removeprefix("tessera: ")
        raise ClusterError(f"{name} didn't start: {words}; all it said is in {part.log}") from error


def _wait_for_all(router: ServerProcess, replicas: int) -> None:
    deadline = time.monotonic() + _JOIN_S
    while len(router.client.get("/v1/cluster").json()["replicas"]) < replicas:
        if time.monotonic() > deadline:
            raise ClusterError(f"the router does not see all replicas; what it said is in {router.log}")
        time.sleep(0.1)


def _stop(part: ServerProcess) -> None:
    with suppress(subprocess.TimeoutExpired):  # it has been killed then
        part.stop()


def shares(cores: list[int], replicas: int) -> list[list[int]]:
    """Cores for each replica; all of them for everybody if there are too few. Those of others make engines wait."""
    if len(cores) < replicas:
        return [cores] * replicas
    return [cores[i * len(cores) // replicas : (i + 1) * len(cores) // replicas] for i in range(replicas)]


def _start_prometheus(folder: Path, parts: dict[str, ServerProcess], stack: ExitStack) -> None:
    if (binary := shutil.which("prometheus")) is None or not ALERTS.is_file():
        say("Prometheus is not installed, and not started")
        return
    port, config = free_port(), folder / "prometheus.yml"
    # JSON is YAML.
    config.write_text(json.dumps(prometheus_config({name: part.port for name, part in parts.items()}), indent=1))
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
    """As docker/prometheus.yml, for processes of this machine."""
    jobs = {
        job: [
            {"targets": [f"127.0.0.1:{port}"], "labels": {"instance": name}}
            for name, port in ports.items()
            if name.startswith(job)
        ]
        for job in ("replica", "router")
    }
    return {
        "global": {"scrape_interval": "15s", "evaluation_interval": "15s"},
        "rule_files": [str(ALERTS)],
        "scrape_configs": [{"job_name": job, "static_configs": targets} for job, targets in jobs.items()],
    }


def _tell(parts: dict[str, ServerProcess]) -> None:
    for name, part in parts.items():
        say(f"{name} at {part.url}")
    say(f"who is there and why requests went where: {parts['router'].url}/v1/cluster; Ctrl-C stops. Try:")
    print(_CURL.format(url=parts["router"].url), flush=True)


def _watch(parts: dict[str, ServerProcess]) -> None:
    """Returns when a process has ended by itself."""
    while True:
        for name, part in parts.items():
            if part.process.poll() is not None:
                say(f"{name} has ended with {part.process.returncode}; what it said is in {part.log}")
                return
        time.sleep(0.5)
