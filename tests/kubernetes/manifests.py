# SPDX-License-Identifier: Apache-2.0
"""The objects of kubernetes/, as kubectl applies them."""

import re
import subprocess
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import pytest
import yaml

from machine.server_process import ROOT
from tests.docker.deployment import program

FOLDER = ROOT / "kubernetes"
BASE = "base"
VARIANTS = ("cpu", "cuda")
"""Folders to apply; each adds to the base, which is complete for itself."""
Object = dict[str, Any]


def kustomization(folder: str) -> Object:
    """The list of a folder's files."""
    loaded: Object = yaml.safe_load((FOLDER / folder / "kustomization.yaml").read_text())
    return loaded


def objects(folder: str) -> list[Object]:
    """Objects of a folder; of any but the base as rendered by kubectl, without which the test is skipped."""
    if folder != BASE and program("kubectl") is None:
        pytest.skip("kubectl is not installed")
    return _objects(folder)


@cache
def _objects(folder: str) -> list[Object]:
    if folder == BASE:
        files = [FOLDER / folder / name for name in kustomization(folder)["resources"]]
        return [each for file in files for each in yaml.safe_load_all(file.read_text())]
    command = [str(program("kubectl")), "kustomize", str(FOLDER / folder)]
    rendered = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return list(yaml.safe_load_all(rendered))


def of_kind(folder: str, kind: str) -> dict[str, Object]:
    """Objects of a kind by name."""
    return {each["metadata"]["name"]: each for each in objects(folder) if each["kind"] == kind}


def workloads(folder: str) -> dict[str, Object]:
    """Deployments and sets by name."""
    return {**of_kind(folder, "Deployment"), **of_kind(folder, "StatefulSet")}


def pod(folder: str, name: str) -> Object:
    """Specification of a workload's pods."""
    spec: Object = workloads(folder)[name]["spec"]["template"]["spec"]
    return spec


def container(folder: str, name: str) -> Object:
    """The container of a workload's pods."""
    (only,) = pod(folder, name)["containers"]
    return only  # type: ignore[no-any-return]


def selected(folder: str, labels: Mapping[str, str]) -> set[str]:
    """Workloads whose pods have ``labels``."""
    assert labels
    return {
        name
        for name, each in workloads(folder).items()
        if labels.items() <= each["spec"]["template"]["metadata"]["labels"].items()
    }


def environment(container: Object, fields: Mapping[str, str], secret: Mapping[str, str]) -> dict[str, str]:
    """Variables of a pod with ``fields``; ``$(NAME)`` is a variable before it, as for kubelet."""
    found: dict[str, str] = {}
    for name, value in _variables(container, fields, secret):
        assert name not in found
        found[name] = re.sub(r"\$\((\w+)\)", lambda match: found[match[1]], value)
    return found


def _variables(container: Object, fields: Mapping[str, str], secret: Mapping[str, str]) -> Iterator[tuple[str, str]]:
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


def port(container: Object, name: str) -> int:
    """Number of a container's named port."""
    (number,) = [each["containerPort"] for each in container["ports"] if each["name"] == name]
    return int(number)
