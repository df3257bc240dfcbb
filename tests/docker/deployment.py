# SPDX-License-Identifier: Apache-2.0
"""The files of docker/, parsed as by Docker and Compose."""

import argparse
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

from machine.server_process import ROOT

DOCKER = ROOT / "docker"
COMPOSE = DOCKER / "compose.yaml"
PROFILES = ("cpu", "cuda", "ascend")
SOURCES = Path("/opt/tessera")
"""The sources' folder in the images."""
_VARIABLE = re.compile(r"\$\{(\w+):-([^${}]*)\}")


def program(name: str) -> str | None:
    """Path of a development program, from a Python package or elsewhere."""
    return shutil.which(name, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))


@cache
def composed() -> Any:
    """The whole of compose.yaml."""
    return yaml.safe_load(COMPOSE.read_text())


def services(profile: str, environment: Mapping[str, str] | None = None) -> dict[str, dict[str, Any]]:
    """Services of ``profile`` by name, with variables from ``environment`` or the file's defaults."""
    chosen = {name: each for name, each in composed()["services"].items() if profile in each["profiles"]}
    variables = {"COMPOSE_PROFILES": profile, **(environment or {})}
    interpolated: dict[str, dict[str, Any]] = _interpolated(chosen, variables)
    return interpolated


def replicas(profile: str, environment: Mapping[str, str] | None = None) -> dict[str, dict[str, Any]]:
    """Services that serve a model."""
    return {name: each for name, each in services(profile, environment).items() if words(each)[:1] == ["serve"]}


def words(service: Mapping[str, Any]) -> list[str]:
    """Arguments of a service's container, after its image's entry point."""
    command = service.get("command", [])
    return shlex.split(command) if isinstance(command, str) else command


@cache
def serve_arguments(*arguments: str) -> argparse.Namespace:
    """Flags as parsed by the command line; cached, since vLLM's many flags take seconds."""
    from app.arguments import parse  # imports vLLM

    return parse(arguments)


def instructions(name: str) -> dict[str, list[Any]]:
    """Instructions of a Dockerfile by name, from BuildKit's parser."""
    found: dict[str, list[Any]] = {}
    for command in dockerfile.parse_file(str(DOCKER / f"{name}.Dockerfile")):
        found.setdefault(command.cmd.upper(), []).append(command)
    return found


def base_image(name: str) -> str:
    """Default base image of a Dockerfile."""
    found = instructions(name)
    defaults = dict(each.value[0].split("=", 1) for each in found["ARG"])
    start = found["FROM"][0]
    return re.sub(r"\$\{(\w+)\}", lambda match: defaults[match[1]], start.value[0])


def health_check(service: Mapping[str, Any]) -> list[str]:
    """Program and arguments of a service's health check."""
    if "healthcheck" in service:
        kind, *test = service["healthcheck"]["test"]
    else:
        (check,) = instructions(profile_of(service["image"]))["HEALTHCHECK"]
        kind, *test = check.value
    assert kind == "CMD"
    return test


def profile_of(image: str) -> str:
    """First name of the Dockerfile that builds ``image``."""
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
