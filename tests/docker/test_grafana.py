# SPDX-License-Identifier: Apache-2.0
"""docker/grafana: Grafana finds data source and dashboard, and the dashboard queries existing series."""

import itertools
import json
import re
from pathlib import PurePosixPath

import pytest

pytest.importorskip("vllm")
import promql_parser
import yaml

from tests.docker.deployment import DOCKER, services
from tests.docker.metrics import ADDED, nodes, replica_series, router_series, selectors

DASHBOARD = json.loads((DOCKER / "grafana" / "dashboards" / "tessera.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
PROVISIONING = DOCKER / "grafana" / "provisioning"
(SOURCE,) = yaml.safe_load((PROVISIONING / "datasources" / "prometheus.yml").read_text())["datasources"]
(PROVIDER,) = yaml.safe_load((PROVISIONING / "dashboards" / "tessera.yml").read_text())["providers"]
GRAFANA = services("cpu")["grafana"]
MOUNTED = {target: source for source, target, _ in (mount.split(":") for mount in GRAFANA["volumes"])}
VARIABLES = {"$__rate_interval": "1m", "$__range": "1h", "$replica": ".*"}


@pytest.fixture(params=PANELS, ids=lambda panel: panel["title"])
def panel(request):
    return request.param


def parse(expression: str) -> promql_parser.Expr:
    for name, value in VARIABLES.items():
        expression = expression.replace(name, value)
    assert "$" not in expression
    return promql_parser.parse(expression)


def expressions(panel) -> list[promql_parser.Expr]:
    return [parse(target["expr"]) for target in panel["targets"]]


def test_the_data_source_is_the_prometheus_service_and_lies_with_the_dashboard_where_grafana_looks():
    port = services("cpu")["prometheus"]["ports"][0].rpartition(":")[2]
    assert (SOURCE["type"], SOURCE["url"]) == ("prometheus", f"http://prometheus:{port}")
    scraped = yaml.safe_load((DOCKER / "prometheus.yml").read_text())["global"]["scrape_interval"]
    assert SOURCE["jsonData"]["timeInterval"] == scraped
    for folder in ("datasources", "dashboards"):
        assert MOUNTED[f"/etc/grafana/provisioning/{folder}"] == f"./grafana/provisioning/{folder}"
    assert MOUNTED[PROVIDER["options"]["path"]] == "./grafana/dashboards"
    home = PurePosixPath(GRAFANA["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert home == PurePosixPath(PROVIDER["options"]["path"]) / "tessera.json"


def test_nobody_needs_or_has_a_password():
    environment = GRAFANA["environment"]
    assert environment["GF_AUTH_ANONYMOUS_ENABLED"] == "true"
    assert environment["GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"] == "true"
    assert "GF_AUTH_ANONYMOUS_ORG_ROLE" not in environment  # by default a viewer's
    assert not [name for name in environment if "PASSWORD" in name]


def test_every_question_goes_to_the_data_source():
    asking = [*PANELS, *DASHBOARD["templating"]["list"], *DASHBOARD["annotations"]["list"]]
    source = {"type": "prometheus", "uid": SOURCE["uid"]}
    assert all(each["datasource"] == source for each in asking)
    assert not [target for panel in PANELS for target in panel["targets"] if "datasource" in target]


def test_panels_have_ids_and_places_of_their_own():
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) > 20
    cells = []
    for place in (panel["gridPos"] for panel in panels):
        assert place["x"] + place["w"] <= 24
        columns, rows = range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"])
        cells += itertools.product(columns, rows)
    assert len(set(cells)) == len(cells)


def test_panels_say_what_they_show_and_ask_for_series_that_exist_with_their_labels(panel):
    assert panel["title"]
    assert panel["description"].endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"]
    references = [target["refId"] for target in panel["targets"]]
    assert references == list("ABCDEFG"[: len(references)])
    for expression in expressions(panel):
        asked = selectors(expression)
        assert asked
        for name in asked.keys() & replica_series().keys():
            assert "instance" in asked[name]  # the replicas selected above


def test_legends_name_labels_that_are_left(panel):
    series = {**replica_series(), **router_series()}
    for target, expression in zip(panel["targets"], expressions(panel), strict=True):
        sums = [node for node in nodes(expression) if isinstance(node, promql_parser.AggregateExpr)]
        left = [set(node.modifier.labels) for node in sums if node.modifier is not None]
        if not left and isinstance(expression, promql_parser.VectorSelector):
            left = [set(series[expression.name].labels | ADDED)]
        named = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
        assert named <= (set.intersection(*left) if left else set())


def test_every_series_of_the_router_and_of_the_registry_is_shown():
    shown = {name for panel in PANELS for expression in expressions(panel) for name in selectors(expression)}
    wanted = router_series().keys() | {name for name in replica_series() if name.startswith("tessera_registry_")}
    assert {name for name in wanted if not name.endswith(("_sum", "_count"))} <= shown


def test_the_replicas_to_choose_from_are_those_with_a_cache_state():
    (variable,) = DASHBOARD["templating"]["list"]
    name, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]["query"]).groups()
    assert label in replica_series()[name].labels | ADDED
    assert (variable["name"], variable["allValue"]) == ("replica", ".*")
