# SPDX-License-Identifier: Apache-2.0
"""docker/compose.yaml: existing commands, matching ports, and no unnecessary exposure."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml

pytest.importorskip("vllm")

from app.cli import _COMMANDS
from app.cluster.router.command import GRACE_S, parser
from app.cluster.router.settings import RouterSettings
from app.settings import load_settings
from tests.docker.deployment import (
    COMPOSE,
    DOCKER,
    PROFILES,
    SOURCES,
    composed,
    health_check,
    instructions,
    profile_of,
    replicas,
    serve_arguments,
    services,
    words,
)

pytestmark = pytest.mark.usefixtures("clean_environment")

CHECKERS = {
    "redis": ("redis:", "redis-cli"),  # Redis' own client
    "prometheus": ("prom/prometheus:", "promtool"),  # comes with Prometheus
    "grafana": ("grafana/grafana:", "curl"),  # Grafana's Alpine image installs it
}
"""Health-check programs of third-party images."""
IMAGE_USERS = {"redis": "redis", "prometheus": "nobody", "grafana": "472"}
SERVICES = [(profile, name) for profile in PROFILES for name in services(profile)]
REPLICAS = [(profile, name) for profile in PROFILES for name in replicas(profile)]


@pytest.fixture(params=PROFILES)
def profile(request):
    return request.param


@pytest.fixture
def configure(monkeypatch):
    """Sets Tessera's variables of a service's container."""

    def configure(service):
        for name, value in service["environment"].items():
            monkeypatch.setenv(name, value)

    return configure


def seconds(text: str) -> int:
    return int(re.fullmatch(r"(\d+)s", text)[1])


def test_the_compose_specification_allows_it():
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(COMPOSE)]
    subprocess.run(command, check=True)


def test_each_profile_has_two_replicas_and_all_that_they_share(profile):
    started = services(profile)
    assert set(started) == {"redis", "router", f"{profile}-1", f"{profile}-2", "prometheus", "grafana"}
    assert set(replicas(profile)) == {f"{profile}-1", f"{profile}-2"}
    assert started["router"]["image"] == f"tessera:{profile}"  # one image to build
    published = [port for each in started.values() for port in each.get("ports", [])]
    assert sorted(published) == ["127.0.0.1:3000:3000", "127.0.0.1:8080:8080", "127.0.0.1:9090:9090"]


@pytest.mark.parametrize("model", [None, "Qwen/Qwen3-0.6B"])
@pytest.mark.parametrize(("profile", "name"), REPLICAS)
def test_replicas_are_started_with_flags_and_settings_that_exist(profile, name, model, configure, monkeypatch):
    service = replicas(profile, {"MODEL": model, "ARGS": "--dtype float32"} if model else {})[name]
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # vLLM sets it; undone after the test
    command, *arguments = words(service)
    assert command in _COMMANDS
    args = serve_arguments(*arguments)
    configure(service)
    settings = load_settings(args)
    assert args.model_tag == model
    assert args.host == "0.0.0.0"
    assert settings.chunk_cache == "require"
    assert settings.replica_name == name.replace(profile, "replica")
    url = urlsplit(settings.advertise_url)
    assert (url.scheme, url.hostname, url.port) == ("http", settings.replica_name, args.port)
    assert service["networks"]["default"]["aliases"] == [url.hostname]
    assert health_check(service)[-1] == str(args.port)
    assert args.shutdown_timeout < seconds(service["stop_grace_period"])


def test_the_router_is_started_with_flags_and_settings_that_exist(profile, configure):
    service = services(profile)["router"]
    command, *arguments = words(service)
    assert command in _COMMANDS
    configure(service)
    variables = {name.removeprefix("TESSERA_").lower() for name in service["environment"]}
    assert variables <= set(RouterSettings.model_fields)
    settings = RouterSettings(**vars(parser().parse_args(arguments)))
    assert settings.host == "0.0.0.0"
    assert service["ports"] == [f"127.0.0.1:{settings.port}:{settings.port}"]
    assert health_check(service)[-1] == str(settings.port)
    assert seconds(service["stop_grace_period"]) > GRACE_S
    (registry,) = {each["environment"]["TESSERA_REGISTRY"] for each in (service, *replicas(profile).values())}
    assert settings.registry == registry
    assert urlsplit(registry).hostname in services(profile)


def merged(node: yaml.MappingNode) -> Iterator[tuple[str, yaml.Node]]:
    """Keys and values of the mappings merged into ``node``, each mapping's own before what it merges."""
    for key, value in node.value:
        if key.tag == "tag:yaml.org,2002:merge":
            for each in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                yield from ((name.value, inner) for name, inner in each.value if name.value != "<<")
                yield from merged(each)


def test_merged_mappings_have_no_keys_in_common():
    """Which of two would win differs between parsers: PyYAML 6.0.4, in podman-compose, takes the last."""
    _, services = next(pair for pair in yaml.compose(COMPOSE.read_text()).value if pair[0].value == "services")
    for name, service in services.value:
        keys = [key for key, _ in merged(service)]
        assert sorted(keys) == sorted(set(keys)), name.value


def test_replicas_have_devices_of_their_own():
    for profile, devices in (("cuda", ["0", "1"]), ("ascend", ["/dev/davinci0", "/dev/davinci1"])):
        assert [_device(each) for each in replicas(profile).values()] == devices
    chosen = {"DEVICE_1": "6", "DEVICE_2": "7", "CPUS_1": "0-3", "CPUS_2": "4-7"}
    assert [_device(each) for each in replicas("cuda", chosen).values()] == ["6", "7"]
    assert [_device(each) for each in replicas("ascend", chosen).values()] == ["/dev/davinci6", "/dev/davinci7"]
    assert [each["cpuset"] for each in replicas("cpu", chosen).values()] == ["0-3", "4-7"]


def _device(service) -> str:
    if "devices" in service:
        return service["devices"][0]
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])
    (id,) = device["device_ids"]
    return id


@pytest.mark.parametrize(("profile", "name"), SERVICES)
def test_services_can_do_no_more_than_they_need(profile, name):
    service = services(profile)[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service.get("cap_add", []) == (["SYS_NICE"] if name in ("cpu-1", "cpu-2") else [])
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["restart"] == "unless-stopped"
    assert re.fullmatch(r"\d+[mg]b", service["mem_limit"])
    assert not {"privileged", "network_mode", "pid", "ipc"} & set(service)
    assert service.get("user") == IMAGE_USERS.get(name)  # of images that are built here: test_dockerfiles.py


@pytest.mark.parametrize(("profile", "name"), SERVICES)
def test_images_are_pinned_or_built_here_and_have_what_their_health_is_checked_with(profile, name):
    service = services(profile)[name]
    repository, _, tag = service["image"].partition(":")
    if repository == "tessera":
        dockerfile = f"docker/{profile_of(service['image'])}.Dockerfile"
        assert service["build"] == {"context": "..", "dockerfile": dockerfile, "args": ["BASE"]}
    else:
        assert re.match(r"v?\d+\.\d+", tag)
    check = health_check(service)
    if name in CHECKERS:
        image, checker = CHECKERS[name]
        assert service["image"].startswith(image)
        assert check[0] == checker
    else:  # every base image has a Python, and Tessera's sources are added
        assert check[0] == "python3"
        assert (DOCKER.parent / Path(check[1]).relative_to(SOURCES)).is_file()


def test_services_wait_only_for_services_that_they_are_composed_with(profile):
    started = services(profile)
    for service in started.values():
        for name, wait in service.get("depends_on", {}).items():
            assert name in started
            assert wait["condition"] in ("service_started", "service_healthy")
            assert wait["condition"] == "service_started" or "healthcheck" in started[name]


def test_mounts_are_volumes_or_files_that_exist(profile):
    mounts = [mount for each in services(profile).values() for mount in each.get("volumes", [])]
    sources = {mount.split(":")[0]: mount for mount in mounts}
    assert set(composed()["volumes"]) == {source for source in sources if not source.startswith((".", "/"))}
    for source, mount in sources.items():
        assert not source.startswith(".") or (DOCKER / source).exists(), source
        assert not source.startswith((".", "/")) or mount.endswith(":ro")
    in_a_folder = replicas(profile, {"MODELS": "/srv/models"}).values()
    assert all("/srv/models:/models" in service["volumes"] for service in in_a_folder)
    assert instructions(profile)["ENV"][0].value[:2] == ("HF_HOME", "/models")


def test_redis_keeps_nothing_and_makes_room_for_heartbeats():
    redis = services("cpu")["redis"]
    command, *flags = words(redis)
    options = dict(zip(flags[::2], flags[1::2], strict=True))
    assert command == "redis-server"
    assert (options["--save"], options["--appendonly"], options["--maxmemory-policy"]) == ("", "no", "volatile-lru")
    assert int(options["--maxmemory"].removesuffix("mb")) < int(redis["mem_limit"].removesuffix("mb"))


def test_the_documentation_has_every_variable():
    table = (DOCKER.parent / "docs" / "deployment.md").read_text().partition("| variable |")[2].partition("\n\n")[0]
    documented = re.findall(r"`([A-Z_0-9]+)`", "\n".join(line.split("|")[1] for line in table.splitlines()[2:]))
    assert sorted(documented) == sorted({*re.findall(r"\$\{(\w+)", COMPOSE.read_text()), "BASE"})
