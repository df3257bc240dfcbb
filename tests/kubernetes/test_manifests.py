# SPDX-License-Identifier: Apache-2.0
"""kubernetes/: valid for Kubernetes, with rights no wider than needed, and for commands and settings that exist."""

import re
import subprocess
import tomllib
from functools import cache
from urllib.parse import urlsplit

import kubernetes_validate
import pytest
import yaml

pytest.importorskip("vllm")

from starlette.testclient import TestClient
from vllm import envs

from app.access.middleware import required_role
from app.access.tenants import Tenant, Tenants
from app.arguments import parse
from app.cluster.router.app import build_app
from app.cluster.router.command import GRACE_S, parser
from app.cluster.router.settings import RouterSettings
from app.server import GRACE_S as SERVERS_GRACE_S
from app.settings import load_settings
from cache.tiers.config import parse_tiers, size_of
from engine_ext.wire import vllm_compat
from machine.server_process import ROOT, free_port
from tests.docker.deployment import DOCKER, health_check, instructions, program, serve_arguments, services, words
from tests.docker.metrics import router_series

pytestmark = pytest.mark.matrix

FOLDER = ROOT / "kubernetes"
BASE = "base"
VARIANTS = ("cpu", "cuda")
"""Folders to apply; each adds to the base, which is complete for itself."""
VERSIONS = ("1.30.0", kubernetes_validate.latest_version())
"""The oldest, since which a container may sleep before it stops, and the newest with a known schema."""
WORKLOADS = ("redis", "replica", "router")
FIELDS = {"metadata.name": "replica-1"}
SECRET = {"tenants.toml": "", "peer-secret": "0123456789abcdef"}
UNITS = {"m": 1, "M": 1, "g": 1024, "G": 1024}
OTHERS = {"HF_TOKEN", "NUMBA_CACHE_DIR", "OMP_NUM_THREADS"}
"""Variables that neither Tessera nor vLLM declares: of huggingface_hub, Numba and OpenMP."""


def kustomization(folder):
    """The list of a folder's files."""
    return yaml.safe_load((FOLDER / folder / "kustomization.yaml").read_text())


def objects(folder):
    """Objects of a folder; of any but the base as rendered by kubectl, without which the test is skipped."""
    if folder != BASE and program("kubectl") is None:
        pytest.skip("kubectl is not installed")
    return _objects(folder)


@cache
def _objects(folder):
    if folder == BASE:
        files = [FOLDER / folder / name for name in kustomization(folder)["resources"]]
        return [each for file in files for each in yaml.safe_load_all(file.read_text())]
    command = [str(program("kubectl")), "kustomize", str(FOLDER / folder)]
    rendered = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return list(yaml.safe_load_all(rendered))


def of_kind(folder, kind):
    """Objects of a kind by name."""
    return {each["metadata"]["name"]: each for each in objects(folder) if each["kind"] == kind}


def workloads(folder):
    """Deployments and sets by name."""
    return {**of_kind(folder, "Deployment"), **of_kind(folder, "StatefulSet")}


def pod(folder, name):
    """Specification of a workload's pods."""
    return workloads(folder)[name]["spec"]["template"]["spec"]


def container(folder, name):
    """The container of a workload's pods."""
    (only,) = pod(folder, name)["containers"]
    return only


def selected(folder, labels):
    """Workloads whose pods have ``labels``."""
    assert labels
    found = {name: each["spec"]["template"]["metadata"]["labels"] for name, each in workloads(folder).items()}
    return {name for name, each in found.items() if labels.items() <= each.items()}


def environment(container, fields, secret):
    """Variables of a pod with ``fields``; ``$(NAME)`` is a variable before it, as for kubelet."""
    found = {}
    for name, value in _variables(container, fields, secret):
        assert name not in found
        found[name] = re.sub(r"\$\((\w+)\)", lambda match: found[match[1]], value)
    return found


def _variables(container, fields, secret):
    for each in container["env"]:
        if "value" in each:
            yield each["name"], each["value"]
            continue
        ((kind, source),) = each["valueFrom"].items()
        if kind == "secretKeyRef":
            assert source["name"] == "tessera"
            if source["key"] in secret or not source.get("optional"):
                yield each["name"], secret[source["key"]]
        elif kind == "fieldRef":
            yield each["name"], fields[source["fieldPath"]]
        else:
            assert kind == "resourceFieldRef"
            amounts, _, resource = source["resource"].partition(".")
            yield each["name"], container["resources"][amounts][resource]


def port(container, name):
    """Number of a container's named port."""
    (number,) = [each["containerPort"] for each in container["ports"] if each["name"] == name]
    return int(number)


@pytest.fixture(params=[BASE, *VARIANTS])
def folder(request):
    return request.param


@pytest.fixture(autouse=True)
def _environment(clean_environment, monkeypatch):
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


@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_has_schemas_that_allow_it(folder, version):
    for each in objects(folder):
        assert version.startswith(kubernetes_validate.validate(each, version, strict=True))


def test_every_file_is_listed_and_exists():
    listed = {FOLDER / BASE / name for name in kustomization(BASE)["resources"]}
    for variant in VARIANTS:
        chosen = kustomization(variant)
        assert chosen["resources"] == [f"../{BASE}"]
        listed |= {FOLDER / variant / each["path"] for each in chosen["patches"] if "path" in each}
    listed |= {FOLDER / each / "kustomization.yaml" for each in (BASE, *VARIANTS)}
    assert listed == {path for path in FOLDER.rglob("*") if path.is_file()}


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_have_the_objects_of_the_base(variant):
    def names(folder):
        return sorted((each["kind"], each["metadata"]["name"]) for each in objects(folder))

    assert names(variant) == names(BASE)
    assert len(set(names(variant))) == len(names(variant))
    assert set(workloads(variant)) == set(WORKLOADS)


def test_selectors_find_the_pods_that_they_are_named_after(folder):
    for name, workload in workloads(folder).items():
        assert selected(folder, workload["spec"]["selector"]["matchLabels"]) == {name}
        assert workload["metadata"]["labels"] == workload["spec"]["template"]["metadata"]["labels"]
        for spread in pod(folder, name).get("topologySpreadConstraints", []):
            assert selected(folder, spread["labelSelector"]["matchLabels"]) == {name}
    budgets, found = of_kind(folder, "PodDisruptionBudget"), of_kind(folder, "Service")
    assert set(found) == set(WORKLOADS)
    assert set(budgets) == {"replica", "router"}  # with one for Redis, its node could not be drained
    for name, service in found.items():
        assert selected(folder, service["spec"]["selector"]) == {name}
    for name, budget in budgets.items():
        assert selected(folder, budget["spec"]["selector"]["matchLabels"]) == {name}
        assert budget["spec"]["maxUnavailable"] == 1


def test_services_lead_to_ports_of_their_containers(folder):
    found = of_kind(folder, "Service")
    for name, service in found.items():
        (only,) = service["spec"]["ports"]
        assert only["port"] == port(container(folder, name), only["targetPort"])
    names = found[workloads(folder)["replica"]["spec"]["serviceName"]]["spec"]  # those of the replicas
    assert names["clusterIP"] == "None"
    assert names["publishNotReadyAddresses"] is True


def test_policies_admit_those_who_need_it(folder):
    prometheus = {"namespaceSelector": {}, "podSelector": {"matchLabels": {"app.kubernetes.io/name": "prometheus"}}}
    admitted = {}
    for name, policy in of_kind(folder, "NetworkPolicy").items():
        assert selected(folder, policy["spec"]["podSelector"]["matchLabels"]) == {name}
        assert policy["spec"]["policyTypes"] == ["Ingress"]
        (rule,) = policy["spec"]["ingress"]
        (only,) = rule["ports"]
        (served,) = of_kind(folder, "Service")[name]["spec"]["ports"]
        assert port(container(folder, name), only["port"]) == served["port"]
        peers = [each["podSelector"]["matchLabels"] for each in rule["from"] if "namespaceSelector" not in each]
        admitted[name] = sorted(who for labels in peers for who in selected(folder, labels))
        elsewhere = [each for each in rule["from"] if "namespaceSelector" in each]
        assert elsewhere == ([prometheus] if name == "replica" else [])
    assert admitted == {"redis": ["replica", "router"], "replica": ["replica", "router"]}


def test_probes_ask_ports_of_their_containers_and_mounts_have_volumes(folder):
    for name in WORKLOADS:
        served = container(folder, name)
        probes = {key: each for key, each in served.items() if key.endswith("Probe")}
        assert {"readinessProbe", "livenessProbe"} <= probes.keys()
        for probe in probes.values():
            assert ("httpGet" in probe and port(served, probe["httpGet"]["port"])) or "exec" in probe
        claims = workloads(folder)[name]["spec"].get("volumeClaimTemplates", [])
        volumes = {each["name"] for each in pod(folder, name)["volumes"]}
        volumes |= {each["metadata"]["name"] for each in claims}
        assert {each["name"] for each in served["volumeMounts"]} == volumes


def test_a_pod_is_restricted(folder):
    """The Pod Security Standard "restricted", and more."""
    for name in WORKLOADS:
        spec, only = pod(folder, name), container(folder, name)
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is False
        # `tessera serve` refuses unknown variables like TESSERA_…, which a Service named tessera-… would add.
        assert spec["enableServiceLinks"] is False
        assert not {"hostNetwork", "hostPID", "hostIPC", "initContainers"} & set(spec)
        assert only["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert {kind for each in spec["volumes"] for kind in each.keys() - {"name"}} <= {"emptyDir", "secret"}
        requests, limits = only["resources"]["requests"], only["resources"]["limits"]
        assert requests["memory"] == limits["memory"]
        assert "cpu" in requests or "cpu" in limits


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
    served, found = container(folder, "replica"), variables("replica")
    args = serve_arguments(*served["args"][1:])
    settings = load_settings(args)
    assert (args.host, args.port) == ("0.0.0.0", port(served, "http"))
    assert settings.chunk_cache == "require"
    assert settings.replica_name == FIELDS["metadata.name"]  # the same after a restart
    assert settings.tenants is not None
    assert not settings.allow_anonymous
    assert settings.peer_secret.get_secret_value() == SECRET["peer-secret"]
    assert {name for name in found if not name.startswith("TESSERA_")} <= OTHERS | envs.environment_variables.keys()
    url = urlsplit(settings.advertise_url)
    service = of_kind(folder, "Service")[workloads(folder)["replica"]["spec"]["serviceName"]]
    assert url.hostname == f"{FIELDS['metadata.name']}.{service['metadata']['name']}"
    assert (url.scheme, url.port) == ("http", service["spec"]["ports"][0]["port"])


def test_replicas_have_time_to_start_and_to_end_their_answers(folder):
    timeout = serve_arguments(*container(folder, "replica")["args"][1:]).shutdown_timeout
    grace = pod(folder, "replica")["terminationGracePeriodSeconds"]
    assert timeout + SERVERS_GRACE_S < grace
    assert f"{grace}s" == composed(folder, "replica")["stop_grace_period"]
    (check,) = instructions(profile(folder))["HEALTHCHECK"]
    (minutes,) = re.findall(r"--start-period=(\d+)m", " ".join(check.flags))
    startup = container(folder, "replica")["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= int(minutes) * 60


def test_the_router_is_started_with_flags_and_settings_that_exist(folder, variables):
    served, found = container(folder, "router"), variables("router")
    assert {name.removeprefix("TESSERA_").lower() for name in found} <= set(RouterSettings.model_fields)
    settings = RouterSettings(**vars(parser().parse_args(served["args"][1:])))
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


def test_the_documentation_makes_the_secret_and_the_source_package_has_the_files():
    text = (ROOT / "docs" / "deployment.md").read_text().partition("\n## Kubernetes\n")[2].partition("\n## ")[0]
    made = re.findall(r"--from-(?:file|literal)=([\w.-]+)", text)
    assert sorted(made) == sorted(SECRET)
    assert "create secret generic tessera " in text
    assert all(f"kubernetes/{variant}" in text for variant in VARIANTS)
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    assert "kubernetes" in build["targets"]["sdist"]["include"]


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


def test_images_commands_and_memory_are_those_of_compose(folder):
    model = {"cuda": ["Qwen/Qwen3-0.6B"]}.get(folder, [])
    for name in ("redis", "replica", "router"):
        ours, theirs = container(folder, name), composed(folder, name)
        command, *flags = words(theirs)
        assert ours["image"] == theirs["image"]
        assert ours["args"] == [command, *(model if name == "replica" else []), *flags]
        assert mebibytes(ours["resources"]["limits"]["memory"]) == mebibytes(theirs["mem_limit"]), name
    shared = mounts(folder, "replica")["/dev/shm"]
    (shm,) = [each["emptyDir"] for each in pod(folder, "replica")["volumes"] if each["name"] == shared]
    assert shm["medium"] == "Memory"
    assert mebibytes(shm["sizeLimit"]) == mebibytes(composed(folder, "replica")["shm_size"])


def test_settings_are_those_of_compose_but_for_addresses_keys_and_tiers(folder, variables):
    own = {"TESSERA_REPLICA_NAME", "TESSERA_ADVERTISE_URL", "TESSERA_PEER_SECRET", "TESSERA_CHUNK_CACHE_TIERS"}
    for name in ("replica", "router"):
        theirs, ours = composed(folder, name)["environment"], variables(name)
        for each in (theirs.keys() & ours.keys()) - own:
            assert ours[each] == theirs[each], each
        # An empty setting is as none.
        missing = {each for each in theirs.keys() - ours.keys() if theirs[each]}
        assert missing <= {"TESSERA_ALLOW_ANONYMOUS", "TESSERA_ROLE"}


def test_redis_is_checked_as_in_compose(folder):
    check = composed(folder, "redis")["healthcheck"]
    probe = container(folder, "redis")["readinessProbe"]
    assert probe["exec"]["command"] == health_check(composed(folder, "redis"))
    assert (f"{probe['periodSeconds']}s", f"{probe['timeoutSeconds']}s") == (check["interval"], check["timeout"])


def test_containers_run_as_the_images_user_who_may_write_what_compose_lets_it(folder):
    (user,) = instructions(profile(folder))["USER"]
    for name in ("replica", "router"):
        assert str(pod(folder, name)["securityContext"]["runAsUser"]) == user.value[0]
        service, mounted = composed(folder, name), mounts(folder, name)
        kept = {each.split(":")[1] for each in service.get("volumes", [])}
        lost = {each.partition(":")[0] for each in service.get("tmpfs", [])}
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
    target, aim = workloads(folder)[spec["scaleTargetRef"]["name"]], spec["scaleTargetRef"]
    assert (target["kind"], target["apiVersion"]) == (aim["kind"], aim["apiVersion"])
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
