# SPDX-License-Identifier: Apache-2.0
"""kubernetes/: valid for Kubernetes, complete, and with rights no wider than needed."""

import copy

import kubernetes_validate
import pytest
import yaml

from tests.kubernetes.manifests import (
    BASE,
    FOLDER,
    VARIANTS,
    container,
    kustomization,
    objects,
    of_kind,
    pod,
    port,
    selected,
    workloads,
)

pytestmark = pytest.mark.matrix

VERSIONS = ("1.30.0", kubernetes_validate.latest_version())
"""The oldest, since which a container may sleep before it stops, and the newest with a known schema."""
PATCH = "replica.yaml"
WORKLOADS = ("redis", "replica", "router")


@pytest.fixture(params=[BASE, *VARIANTS])
def folder(request):
    return request.param


@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_has_schemas_that_allow_it(folder, version):
    for each in objects(folder):
        assert version.startswith(kubernetes_validate.validate(each, version, strict=True))


def test_a_misspelt_field_would_be_noticed():
    wrong = copy.deepcopy(workloads(BASE)["replica"])
    wrong["spec"]["template"]["spec"]["terminationGracePeriodsSeconds"] = 45
    with pytest.raises(kubernetes_validate.ValidationError, match="terminationGracePeriodsSeconds"):
        kubernetes_validate.validate(wrong, VERSIONS[-1], strict=True)


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


@pytest.mark.parametrize("variant", VARIANTS)
def test_patches_change_objects_that_exist(variant):
    """A patch of an unknown container would add one."""
    patch = yaml.safe_load((FOLDER / variant / PATCH).read_text())
    base = workloads(BASE)[patch["metadata"]["name"]]
    assert patch["kind"] == base["kind"]
    patched = [each["name"] for each in patch["spec"]["template"]["spec"]["containers"]]
    assert patched == [each["name"] for each in base["spec"]["template"]["spec"]["containers"]]


def test_there_are_the_same_workloads_everywhere(folder):
    assert set(workloads(folder)) == set(WORKLOADS)


def test_selectors_find_the_pods_that_they_are_named_after(folder):
    for name, workload in workloads(folder).items():
        assert selected(folder, workload["spec"]["selector"]["matchLabels"]) == {name}
        assert workload["metadata"]["labels"] == workload["spec"]["template"]["metadata"]["labels"]
        for spread in pod(folder, name).get("topologySpreadConstraints", []):
            assert selected(folder, spread["labelSelector"]["matchLabels"]) == {name}
    for name, service in of_kind(folder, "Service").items():
        assert selected(folder, service["spec"]["selector"]) == {name}
    for name, budget in of_kind(folder, "PodDisruptionBudget").items():
        assert selected(folder, budget["spec"]["selector"]["matchLabels"]) == {name}
        assert budget["spec"]["maxUnavailable"] == 1
    assert set(of_kind(folder, "Service")) == set(WORKLOADS)
    assert set(of_kind(folder, "PodDisruptionBudget")) == {
        "replica",
        "router",
    }  # with one for Redis, its node could not be drained


def test_services_lead_to_ports_of_their_containers(folder):
    for name, service in of_kind(folder, "Service").items():
        (only,) = service["spec"]["ports"]
        assert only["port"] == port(container(folder, name), only["targetPort"])


def test_the_set_has_its_names_from_its_service(folder):
    service = of_kind(folder, "Service")[workloads(folder)["replica"]["spec"]["serviceName"]]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True


def test_policies_admit_those_who_need_it(folder):
    policies = of_kind(folder, "NetworkPolicy")
    admitted = {}
    for name, policy in policies.items():
        assert selected(folder, policy["spec"]["podSelector"]["matchLabels"]) == {name}
        assert policy["spec"]["policyTypes"] == ["Ingress"]
        (rule,) = policy["spec"]["ingress"]
        (only,) = rule["ports"]
        assert (
            port(container(folder, name), only["port"]) == of_kind(folder, "Service")[name]["spec"]["ports"][0]["port"]
        )
        peers = [each["podSelector"]["matchLabels"] for each in rule["from"] if "namespaceSelector" not in each]
        elsewhere = [each for each in rule["from"] if "namespaceSelector" in each]
        admitted[name] = sorted(who for labels in peers for who in selected(folder, labels))
        prometheus = {"namespaceSelector": {}, "podSelector": {"matchLabels": {"app.kubernetes.io/name": "prometheus"}}}
        assert elsewhere == ([prometheus] if name == "replica" else [])
    assert admitted == {"redis": ["replica", "router"], "replica": ["replica", "router"]}


def test_probes_ask_ports_of_their_containers(folder):
    for name in WORKLOADS:
        served = container(folder, name)
        probes = {key: each for key, each in served.items() if key.endswith("Probe")}
        assert {"readinessProbe", "livenessProbe"} <= probes.keys()
        for probe in probes.values():
            assert ("httpGet" in probe and port(served, probe["httpGet"]["port"])) or "exec" in probe


def test_a_pod_is_restricted(folder):
    """The Pod Security Standard "restricted", and more."""
    for name in WORKLOADS:
        spec = pod(folder, name)
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is False
        assert not {"hostNetwork", "hostPID", "hostIPC", "initContainers"} & set(spec)
        assert container(folder, name)["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert {kind for each in spec["volumes"] for kind in each.keys() - {"name"}} <= {"emptyDir", "secret"}


def test_services_add_no_variables(folder):
    """`tessera serve` refuses unknown variables that begin with TESSERA_, which a Service named tessera-… would add."""
    assert all(pod(folder, name)["enableServiceLinks"] is False for name in WORKLOADS)


def test_mounts_have_volumes_and_volumes_are_mounted(folder):
    for name in WORKLOADS:
        claims = workloads(folder)[name]["spec"].get("volumeClaimTemplates", [])
        volumes = [
            *(each["name"] for each in pod(folder, name)["volumes"]),
            *(each["metadata"]["name"] for each in claims),
        ]
        mounted = [each["name"] for each in container(folder, name)["volumeMounts"]]
        assert sorted(volumes) == sorted(mounted)


def test_no_container_can_take_the_nodes_memory(folder):
    for name in WORKLOADS:
        resources = container(folder, name)["resources"]
        assert resources["requests"]["memory"] == resources["limits"]["memory"]
        assert "cpu" in resources["requests"] or "cpu" in resources["limits"]
