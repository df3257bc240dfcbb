# SPDX-License-Identifier: Apache-2.0
"""The files of docker/, as Docker and Compose read them."""

import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import dockerfile
import yaml

from tools.server_process import ROOT

DOCKER = ROOT / "docker"
COMPOSE = DOCKER / "compose.yaml"
PROFILES = ("cpu", "cuda", "ascend")
SOURCES = Path("/opt/tessera")
"""Where the images have what .dockerignore lets through."""
_VARIABLE = re.compile(r"\$\{(\w+):-([^${}]*)\}")


def program(name: str) -> str | None:
    """The path of a program that a developer may have, from a Python package or otherwise."""
    return shutil.which(name, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))


@cache
def composed() -> Any:
    """The whole of compose.yaml."""
    return yaml.safe_load(COMPOSE.read_text())


def services(profile: str, environment: Mapping[str, str] | None = None) -> dict[str, dict[str, Any]]:
    """The services of ``profile``, by name; variables are those of ``environment``, else the defaults in the file."""
    chosen = {name: each for name, each in composed()["services"].items() if profile in each["profiles"]}
    interpolated: dict[str, dict[str, Any]] = _interpolated(
        chosen, {"COMPOSE_PROFILES": profile, **(environment or {})}
    )
    return interpolated


def replicas(profile: str, environment: Mapping[str, str] | None = None) -> dict[str, dict[str, Any]]:
    """Those of the services that serve a model."""
    return {name: each for name, each in services(profile, environment).items() if words(each)[:1] == ["serve"]}


def words(service: Mapping[str, Any]) -> list[str]:
    """What a service's container is started with, behind its image's entry point."""
    command = service.get("command", [])
    return shlex.split(command) if isinstance(command, str) else command


def instructions(name: str) -> dict[str, list[Any]]:
    """The instructions of a Dockerfile by their names, each as BuildKit's parser gives it."""
    found: dict[str, list[Any]] = {}
    for command in dockerfile.parse_file(str(DOCKER / f"{name}.Dockerfile")):
        found.setdefault(command.cmd.upper(), []).append(command)
    return found


def base_image(name: str) -> str:
    """What a Dockerfile builds upon unless it is told otherwise."""
    found = instructions(name)
    defaults = dict(each.value[0].split("=", 1) for each in found["ARG"])
    (start,) = found["FROM"]
    return re.sub(r"\$\{(\w+)\}", lambda match: defaults[match[1]], start.value[0])


def health_check(service: Mapping[str, Any]) -> list[str]:
    """The program, with its arguments, that says whether a service's container is healthy."""
    if "healthcheck" in service:
        kind, *test = service["healthcheck"]["test"]
    else:
        (check,) = instructions(profile_of(service["image"]))["HEALTHCHECK"]
        kind, *test = check.value
    assert kind == "CMD"
    return test


def profile_of(image: str) -> str:
    """The Dockerfile, by its first name, that makes ``image``."""
    name, _, tag = image.partition(":")
    assert name == "tessera"
    assert tag in PROFILES
    return tag


def _interpolated(value: Any, environment: Mapping[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: _interpolated(each, environment) for key, each in value.items()}
    if isinstance(value, list):
        return [_interpolated(each, environment) for each in value]
    if not isinstance(value, str):
        return value
    text = _VARIABLE.sub(lambda match: environment.get(match[1]) or match[2], value)
    assert "$" not in text, f"{value!r}: only ${{NAME:-default}} is read here"
    return text
