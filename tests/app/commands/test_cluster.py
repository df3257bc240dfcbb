# SPDX-License-Identifier: Apache-2.0
"""`tessera cluster` without its processes."""

import pytest
import yaml

from app.commands.cluster import ALERTS, main, prometheus_config, shares
from tools.server_process import ROOT


def test_cores_are_divided_and_none_is_left_over():
    assert shares([0, 1, 2, 3], 2) == [[0, 1], [2, 3]]
    assert shares([4, 5, 6, 7, 8], 2) == [[4, 5], [6, 7, 8]]
    assert shares([0], 2) == [[0], [0]]
    assert [core for share in shares(list(range(17)), 5) for core in share] == list(range(17))


def test_prometheus_reads_what_that_of_compose_reads():
    ours = prometheus_config({"replica-1": 8001, "replica-2": 8002, "router": 8080})
    composed = yaml.safe_load((ROOT / "docker" / "prometheus.yml").read_text())
    assert ours["global"] == composed["global"]
    jobs = [[job["job_name"] for job in config["scrape_configs"]] for config in (ours, composed)]
    assert jobs[0] == jobs[1]
    replica, router = (job["static_configs"] for job in ours["scrape_configs"])
    assert [(each["targets"], each["labels"]) for each in [*replica, *router]] == [
        (["127.0.0.1:8001"], {"instance": "replica-1"}),
        (["127.0.0.1:8002"], {"instance": "replica-2"}),
        (["127.0.0.1:8080"], {"instance": "router"}),
    ]
    assert ours["rule_files"] == [str(ALERTS)]
    assert ALERTS.is_file()


def test_without_redis_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setenv("PATH", "")
    assert main([]) == 2
    assert "apt install redis-server" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [["--replicas", "0"], ["--replicas", "x"]])
def test_wrong_flags_are_refused(wrong, capsys):
    with pytest.raises(SystemExit) as ended:
        main(wrong)
    assert ended.value.code == 2
    assert "--replicas" in capsys.readouterr().err
