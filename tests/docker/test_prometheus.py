# SPDX-License-Identifier: Apache-2.0
"""docker/prometheus.yml scrapes what compose.yaml serves; app/cluster/alerts.yml asks for metrics that exist."""

import re
import shutil
import subprocess
from pathlib import PurePosixPath

import pytest

pytest.importorskip("vllm")
import promql_parser
import yaml

from machine.server_process import ROOT
from tests.docker.deployment import DOCKER, PROFILES, health_check, program, replicas, services
from tests.docker.metrics import replica_series, router_series, selectors

PATH = DOCKER / "prometheus.yml"
CONFIG = yaml.safe_load(PATH.read_text())
GROUPS = yaml.safe_load((ROOT / "app" / "cluster" / "alerts.yml").read_text())["groups"]
RULES = [rule for group in GROUPS for rule in group["rules"]]
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
        (each["networks"]["default"]["aliases"][0], health_check(each)[-1]) for each in replicas(profile).values()
    ]
    assert targets("replica") == [f"{name}:{port}" for name, port in served]
    assert targets("router") == [f"router:{health_check(composed['router'])[-1]}"]
    without_port = {"source_labels": ["__address__"], "regex": r"(.*):\d+", "target_label": "instance"}
    assert [config["relabel_configs"] for config in CONFIG["scrape_configs"]] == [[without_port]] * 2


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


@pytest.fixture(params=RULES, ids=lambda rule: rule["alert"])
def rule(request):
    return request.param


def test_rules_have_what_prometheus_and_people_need_and_ask_for_metrics_that_exist(rule):
    assert [each["alert"] for each in RULES].count(rule["alert"]) == 1
    assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
    assert re.fullmatch(r"[A-Z]\w+", rule["alert"])
    assert re.fullmatch(r"\d+[smh]", rule.get("for", "0s"))
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert len(rule["annotations"]["description"]) > 100
    assert selectors(promql_parser.parse(rule["expr"]))
    assert re.search(r"(==|<|>|<=|>=) [\d.]+$", rule["expr"])  # a threshold at the end
    named = set(re.findall(r"\btessera_\w+", rule["annotations"]["description"]))
    assert named <= replica_series().keys() | router_series().keys()
