# SPDX-License-Identifier: Apache-2.0
"""app/cluster/alerts.yml: valid Prometheus rules over existing metrics."""

import re
import shutil
import subprocess
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")
import yaml

from app.cluster.router.metrics import RouterMetrics
from app.prometheus import ChunkCacheCollector
from engine_ext.core.stats import COUNTERS, HISTOGRAMS
from machine.server_process import ROOT
from tests.app.helpers import cache_with
from tests.cache.helpers import make_manager
from tests.serving import in_a_loop

PATH = ROOT / "app" / "cluster" / "alerts.yml"
RULES = [rule for group in yaml.safe_load(PATH.read_text())["groups"] for rule in group["rules"]]
SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}
OPENED_BY = {")": "(", "]": "[", "}": "{"}


def series() -> set[str]:
    """Names of all time series of a server with the cache on."""
    engine = SimpleNamespace(cache=cache_with(make_manager()))
    collected = ChunkCacheCollector(engine, wanted=True, in_loop=in_a_loop).collect()
    kinds = {metric.name: metric.type for metric in collected}
    kinds |= {f"tessera_{name}": "counter" for name in COUNTERS}
    kinds |= {f"tessera_{name}": "histogram" for name in HISTOGRAMS}
    kinds |= {metric.name: metric.type for metric in RouterMetrics().collected.collect()}
    kinds |= {"tessera_registry_up": "gauge"}
    return {name + suffix for name, kind in kinds.items() for suffix in SUFFIXES[kind]}


@pytest.fixture(params=RULES, ids=lambda rule: rule["alert"])
def rule(request):
    return request.param


def test_names_are_unique():
    names = [rule["alert"] for rule in RULES]
    assert len(set(names)) == len(names) > 0


def test_rules_have_what_prometheus_and_people_need(rule):
    assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
    assert re.fullmatch(r"[A-Z]\w+", rule["alert"])
    assert re.fullmatch(r"\d+[smh]", rule.get("for", "0s"))
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert len(rule["annotations"]["description"]) > 100


def test_expressions_name_metrics_that_exist(rule):
    named = set(re.findall(r"\btessera_\w+", rule["expr"]))
    assert named or rule["expr"].startswith("up{")  # Prometheus' own
    assert named <= series()


def test_descriptions_name_metrics_that_exist(rule):
    assert set(re.findall(r"\btessera_\w+", rule["annotations"]["description"])) <= series()


def test_expressions_are_well_formed(rule):
    opened: list[str] = []
    for character in re.sub(r'"[^"]*"', "", rule["expr"]):
        assert character != '"'
        if character in OPENED_BY.values():
            opened.append(character)
        elif character in OPENED_BY:
            assert opened.pop() == OPENED_BY[character]
    assert not opened
    assert re.search(r"(==|<|>|<=|>=) [\d.]+$", rule["expr"])  # a threshold at the end
    assert all(re.fullmatch(r"\[\d+[smh]\]", window) for window in re.findall(r"\[.*?\]", rule["expr"]))
    for counter in re.findall(r"\btessera_\w+_(?:total|bucket)\b", rule["expr"]):
        assert re.search(rf"(rate|increase)\({counter}", rule["expr"])


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_accepts_the_rules():
    subprocess.run(["promtool", "check", "rules", str(PATH)], check=True)
