# SPDX-License-Identifier: Apache-2.0
"""kubernetes/ starts Tessera with commands, settings and paths that exist, as docker/compose.yaml does."""

import os
import re
import tomllib
from functools import cache
from urllib.parse import urlsplit

import pytest
import yaml

pytest.importorskip("vllm")

from starlette.testclient import TestClient
from vllm import envs

from app.access.middleware import required_role
from app.access.tenants import Tenant, Tenants
from app.arguments import parse
from app.cli import _COMMANDS
from app.cluster.router.app import build_app
from app.cluster.router.command import GRACE_S, parser
from app.cluster.router.settings import RouterSettings
from app.server import GRACE_S as SERVERS_GRACE_S
from app.settings import load_settings
from cache.tiers.config import parse_tiers, size_of
from engine_ext.wire import vllm_compat
from machine.server_process import ROOT, free_port
from tests.docker.deployment import DOCKER, health_check, instructions, services, words
from tests.docker.metrics import router_series
from tests.kubernetes.manifests import BASE, VARIANTS, container, environment, of_kind, pod, port, workloads

pytestmark = pytest.mark.matrix

FIELDS = {"metadata.name": "replica-1"}
SECRET = {"tenants.toml": "", "peer-secret": "0123456789abcdef"}
UNITS = {"m": 1, "M": 1, "g": 1024, "G": 1024}
OTHERS = {"HF_TOKEN", "OMP_NUM_THREADS"}
"""Variables that neither Tessera nor vLLM declares: of huggingface_hub and of OpenMP."""


@pytest.fixture(params=[BASE, *VARIANTS])
def folder(request):
    return request.param


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    for name in list(os.environ):
        if name.startswith("TESSERA_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # vLLM sets it; undone after the test


@pytest.fixture
def variables(folder, monkeypatch):
    """Sets the variables of a workload's container and returns them."""

    def variables(name):
        found = environment(container(folder, name), FIELDS, SECRET)
        for each, value in found.items():
            monkeypatch.setenv(each, value)
        return found

    return variables


@cache
def serve_arguments(*arguments):
    """Flags as parsed by the command line; cached, since vLLM's many flags take seconds."""
    return parse(arguments)


@cache
def serve_paths():
    """Paths that a replica answers before Tessera's own are added."""
    args = parse([])
    args.middleware = []
    return {route.path for route in vllm_compat.build_app(args, ("generate",)).routes}


def profile(folder):
    return "cpu" if folder == BASE else folder


def composed(folder, name):
    """The same service in compose.yaml."""
    found = services(profile(folder))
    return found.get(name) or found[f"{profile(folder)}-1"]


def mebibytes(size):
    number, unit = re.fullmatch(r"(\d+)(?:([mg])b|([MG])i)", size).group(1, 0)
    return int(number) * UNITS[unit[len(number)]]


def probe_paths(folder, name):
    return {key: each["httpGet"]["path"] for key, each in container(folder, name).items() if key.endswith("Probe")}


def mounts(folder, name):
    return {each["mountPath"]: each["name"] for each in container(folder, name)["volumeMounts"]}


def claims(folder):
    """Sizes of the replicas' volumes in MiB."""
    templates = workloads(folder)["replica"]["spec"]["volumeClaimTemplates"]
    return {each["metadata"]["name"]: mebibytes(each["spec"]["resources"]["requests"]["storage"]) for each in templates}


def test_replicas_are_started_with_flags_and_settings_that_exist(folder, variables):
    served = container(folder, "replica")
    command, *flags = served["args"]
    assert command == "serve"
    assert command in _COMMANDS
    args = serve_arguments(*flags)
    found = variables("replica")
    settings = load_settings(args)
    assert (args.host, args.port) == ("0.0.0.0", port(served, "http"))
    assert settings.chunk_cache == "require"
    assert settings.replica_name == FIELDS["metadata.name"]  # the same after a restart
    assert settings.tenants is not None
    assert not settings.allow_anonymous
    assert settings.peer_secret.get_secret_value() == SECRET["peer-secret"]
    assert {name for name in found if not name.startswith("TESSERA_")} <= OTHERS | envs.environment_variables.keys()


def test_replicas_are_reached_at_the_address_that_they_register(folder, variables):
    variables("replica")
    url = urlsplit(load_settings(serve_arguments()).advertise_url)
    service = of_kind(folder, "Service")[workloads(folder)["replica"]["spec"]["serviceName"]]
    assert url.hostname == f"{FIELDS['metadata.name']}.{service['metadata']['name']}"
    assert (url.scheme, url.port) == ("http", service["spec"]["ports"][0]["port"])


def test_replicas_have_time_to_end_their_answers(folder):
    timeout = serve_arguments(*container(folder, "replica")["args"][1:]).shutdown_timeout
    grace = pod(folder, "replica")["terminationGracePeriodSeconds"]
    assert timeout + SERVERS_GRACE_S < grace
    assert f"{grace}s" == composed(folder, "replica")["stop_grace_period"]


def test_the_router_is_started_with_flags_and_settings_that_exist(folder, variables):
    served = container(folder, "router")
    command, *flags = served["args"]
    assert command == "route"
    assert command in _COMMANDS
    found = variables("router")
    assert {name.removeprefix("TESSERA_").lower() for name in found} <= set(RouterSettings.model_fields)
    settings = RouterSettings(**vars(parser().parse_args(flags)))
    assert (settings.host, settings.port) == ("0.0.0.0", port(served, "http"))
    assert settings.tenants is not None
    assert not settings.allow_anonymous
    wait = served["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert wait + GRACE_S < pod(folder, "router")["terminationGracePeriodSeconds"]


def test_routers_and_replicas_have_one_registry_and_its_address(folder, variables):
    (url,) = {urlsplit(variables(name)["TESSERA_REGISTRY"]) for name in ("replica", "router")}
    assert url.port == of_kind(folder, "Service")[url.hostname]["spec"]["ports"][0]["port"]
    assert variables("replica")["TESSERA_PEER_SECRET"] == variables("router")["TESSERA_PEER_SECRET"]


def test_keys_are_mounted_where_they_are_looked_for(folder, variables):
    for name in ("replica", "router"):
        directory, _, file = variables(name)["TESSERA_TENANTS"].rpartition("/")
        (volume,) = [each for each in pod(folder, name)["volumes"] if each["name"] == mounts(folder, name)[directory]]
        assert volume["secret"]["secretName"] == "tessera"
        assert [each["path"] for each in volume["secret"]["items"]] == [file]
        assert {each["key"] for each in volume["secret"]["items"]} <= SECRET.keys()


def test_the_documentation_makes_the_secret():
    text = (ROOT / "docs" / "deployment.md").read_text().partition("\n## Kubernetes\n")[2].partition("\n## ")[0]
    made = re.findall(r"--from-(?:file|literal)=([\w.-]+)", text)
    assert sorted(made) == sorted(SECRET)
    assert "create secret generic tessera " in text
    assert all(f"kubernetes/{variant}" in text for variant in VARIANTS)


def test_replicas_answer_their_probes_without_a_key(folder):
    paths = probe_paths(folder, "replica")
    assert set(paths) == {"startupProbe", "readinessProbe", "livenessProbe"}
    for path in paths.values():
        assert path in serve_paths()
        assert required_role("GET", path) is None


def test_a_router_without_replicas_is_alive_but_not_ready(folder):
    tenants = Tenants({"a": Tenant(name="a", keys=(f"sha256:{'0' * 64}",))})
    settings = RouterSettings(registry=f"redis://127.0.0.1:{free_port()}/0")
    paths = probe_paths(folder, "router")
    with TestClient(build_app(settings, tenants)) as client:
        status = {probe: client.get(path).status_code for probe, path in paths.items()}
    assert status == {"livenessProbe": 200, "readinessProbe": 503}


def test_replicas_have_at_least_the_time_to_start_that_their_image_gives_them(folder):
    (check,) = instructions(profile(folder))["HEALTHCHECK"]
    (minutes,) = re.findall(r"--start-period=(\d+)m", " ".join(check.flags))
    startup = container(folder, "replica")["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= int(minutes) * 60


def test_images_are_those_of_compose(folder):
    for name in ("redis", "replica", "router"):
        assert container(folder, name)["image"] == composed(folder, name)["image"]


def test_commands_are_those_of_compose(folder):
    model = {"cuda": ["Qwen/Qwen3-0.6B"]}.get(folder, [])
    command, *flags = words(composed(folder, "replica"))
    assert container(folder, "replica")["args"] == [command, *model, *flags]
    for name in ("redis", "router"):
        assert container(folder, name)["args"] == words(composed(folder, name)), name


def test_settings_are_those_of_compose_but_for_addresses_keys_and_tiers(folder, variables):
    own = {"TESSERA_REPLICA_NAME", "TESSERA_ADVERTISE_URL", "TESSERA_PEER_SECRET", "TESSERA_CHUNK_CACHE_TIERS"}
    for name in ("replica", "router"):
        theirs, ours = composed(folder, name)["environment"], variables(name)
        for each in (theirs.keys() & ours.keys()) - own:
            assert ours[each] == theirs[each], each
        assert theirs.keys() - ours.keys() <= {"TESSERA_ALLOW_ANONYMOUS", "TESSERA_ROLE", "HF_TOKEN"}


def test_redis_is_checked_as_in_compose(folder):
    check = composed(folder, "redis")["healthcheck"]
    probe = container(folder, "redis")["readinessProbe"]
    assert probe["exec"]["command"] == health_check(composed(folder, "redis"))
    assert (f"{probe['periodSeconds']}s", f"{probe['timeoutSeconds']}s") == (check["interval"], check["timeout"])


def test_memory_is_that_of_compose(folder):
    for name in ("redis", "replica", "router"):
        limit = container(folder, name)["resources"]["limits"]["memory"]
        assert mebibytes(limit) == mebibytes(composed(folder, name)["mem_limit"]), name
    (shm,) = [
        each for each in pod(folder, "replica")["volumes"] if each["name"] == mounts(folder, "replica")["/dev/shm"]
    ]
    assert shm["emptyDir"]["medium"] == "Memory"
    assert mebibytes(shm["emptyDir"]["sizeLimit"]) == mebibytes(composed(folder, "replica")["shm_size"])


def test_containers_run_as_the_images_user_who_may_write_what_compose_lets_it(folder):
    (user,) = instructions(profile(folder))["USER"]
    for name in ("replica", "router"):
        assert str(pod(folder, name)["securityContext"]["runAsUser"]) == user.value[0]
        service = composed(folder, name)
        kept = {each.split(":")[1] for each in service.get("volumes", [])}
        lost = {each.partition(":")[0] for each in service.get("tmpfs", [])}
        mounted = mounts(folder, name)
        assert mounted.keys() - {"/keys", "/dev/shm"} == kept | lost
        assert {mounted[path] for path in kept} == (set(claims(folder)) if kept else set())
    assert str(pod(folder, "replica")["securityContext"]["fsGroup"]) == user.value[0]


def test_a_tier_fits_its_volume(folder, variables):
    (url,) = parse_tiers(variables("replica")["TESSERA_CHUNK_CACHE_TIERS"])
    volume = mounts(folder, "replica")[urlsplit(url).path]
    assert size_of(url)[1] < claims(folder)[volume] << 20


def test_replicas_on_cpus_have_a_thread_for_each_core_of_their_own(variables, folder):
    resources, found = container(folder, "replica")["resources"], variables("replica")
    if folder == "cpu":
        assert found["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
        assert int(found["OMP_NUM_THREADS"]) == int(resources["requests"]["cpu"]) > 0
    assert resources["limits"].get("nvidia.com/gpu") == ("1" if folder == "cuda" else None)


def test_the_autoscaler_follows_a_metric_of_the_routers_as_ray_does(folder):
    (spec,) = (each["spec"] for each in of_kind(folder, "HorizontalPodAutoscaler").values())
    target = workloads(folder)[spec["scaleTargetRef"]["name"]]
    assert (target["kind"], target["apiVersion"]) == (
        spec["scaleTargetRef"]["kind"],
        spec["scaleTargetRef"]["apiVersion"],
    )
    assert "replicas" not in target["spec"]  # applying again would set it
    (metric,) = spec["metrics"]
    source = metric["object"]
    assert source["describedObject"]["name"] in of_kind(folder, source["describedObject"]["kind"])
    assert not router_series()[source["metric"]["name"]].grows
    (application,) = yaml.safe_load((DOCKER / "ray-serve.yaml").read_text())["applications"]
    (ray,) = [each["autoscaling_config"] for each in application["deployments"] if "autoscaling_config" in each]
    assert (spec["minReplicas"], spec["maxReplicas"]) == (ray["min_replicas"], ray["max_replicas"])
    assert int(source["target"]["averageValue"]) == ray["target_ongoing_requests"]
    assert spec["behavior"]["scaleDown"]["stabilizationWindowSeconds"] == ray["downscale_delay_s"]


def test_the_source_package_has_it():
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    assert "kubernetes" in build["targets"]["sdist"]["include"]
