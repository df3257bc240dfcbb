# SPDX-License-Identifier: Apache-2.0
"""docker/prometheus.yml: valid for Prometheus, and scrapes the services of compose.yaml."""

import shutil
import subprocess
from pathlib import PurePosixPath

import pytest
import yaml

from tests.docker.deployment import DOCKER, PROFILES, health_check, program, replicas, services

PATH = DOCKER / "prometheus.yml"
CONFIG = yaml.safe_load(PATH.read_text())
MOUNTED = dict(mount.split(":")[1::-1] for mount in services("cpu")["prometheus"]["volumes"])
"""Mounted files in the container."""


def targets(job: str) -> list[str]:
    (config,) = [each for each in CONFIG["scrape_configs"] if each["job_name"] == job]
    assert config.keys() == {"job_name", "static_configs", "relabel_configs"}  # by default: http, /metrics
    return [target for group in config["static_configs"] for target in group["targets"]]


@pytest.mark.parametrize("profile", PROFILES)
def test_it_reads_every_replica_and_the_router(profile):
    composed = services(profile)
    served = [
        f"{each['networks']['default']['aliases'][0]}:{health_check(each)[-1]}" for each in replicas(profile).values()
    ]
    assert targets("replica") == served
    assert targets("router") == [f"router:{health_check(composed['router'])[-1]}"]


def test_series_name_the_service_without_its_port():
    for config in CONFIG["scrape_configs"]:
        assert config["relabel_configs"] == [
            {"source_labels": ["__address__"], "regex": r"(.*):\d+", "target_label": "instance"}
        ]


def test_it_is_mounted_where_it_is_looked_for():
    flags = services("cpu")["prometheus"]["command"]
    (path,) = [flag.partition("=")[2] for flag in flags if flag.startswith("--config.file=")]
    assert MOUNTED[path] == "./prometheus.yml"
    (rules,) = CONFIG["rule_files"]
    assert MOUNTED[str(PurePosixPath(path).parent / rules)] == "../app/cluster/alerts.yml"
    (stored,) = [flag.partition("=")[2] for flag in flags if flag.startswith("--storage.tsdb.path=")]
    assert MOUNTED[stored] == "prometheus"


@pytest.mark.skipif(program("promtool") is None, reason="promtool is not installed")
def test_promtool_accepts_it_with_its_rules(tmp_path):
    for target, source in MOUNTED.items():
        if source.startswith("."):
            shutil.copy(DOCKER / source, tmp_path / PurePosixPath(target).name)
    subprocess.run([program("promtool"), "check", "config", str(tmp_path / PATH.name)], check=True)
