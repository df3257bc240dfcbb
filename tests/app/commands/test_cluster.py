# SPDX-License-Identifier: Apache-2.0
"""`tessera cluster` without its processes."""

import itertools
from types import SimpleNamespace

import pytest
import yaml

from app.commands import cluster
from app.commands.cluster import ALERTS, Part, main, named_replicas, prometheus_config, shares
from machine.server_process import ROOT
from tests.cache.helpers import Clock


def test_cores_are_divided_and_none_is_left_over():
    assert shares([0, 1, 2, 3], 2) == [[0, 1], [2, 3]]
    assert shares([4, 5, 6, 7, 8], 2) == [[4, 5], [6, 7, 8]]
    assert shares([0], 2) == [[0], [0]]


def test_prometheus_reads_what_that_of_compose_reads():
    ours = prometheus_config({"replica-1": 8001, "decode-1": 8002, "router": 8080})
    composed = yaml.safe_load((ROOT / "docker" / "prometheus.yml").read_text())
    assert ours["global"] == composed["global"]
    jobs = [[job["job_name"] for job in config["scrape_configs"]] for config in (ours, composed)]
    assert jobs[0] == jobs[1]
    replica, router = (job["static_configs"] for job in ours["scrape_configs"])
    assert [(each["targets"], each["labels"]) for each in [*replica, *router]] == [
        (["127.0.0.1:8001"], {"instance": "replica-1"}),
        (["127.0.0.1:8002"], {"instance": "decode-1"}),
        (["127.0.0.1:8080"], {"instance": "router"}),
    ]
    assert ours["rule_files"] == [str(ALERTS)]
    assert ALERTS.is_file()


def test_without_redis_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setenv("PATH", "")
    assert main([]) == 2
    assert "apt install redis-server" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", ["0", "x"])
def test_wrong_flags_are_refused(wrong, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--replicas", wrong])
    assert ended.value.code == 2
    assert "--replicas" in capsys.readouterr().err


def test_roles_go_together(capsys):
    assert named_replicas(None, None, None) == {"replica-1": "both", "replica-2": "both"}
    assert named_replicas(None, 1, 2) == {"prefill-1": "prefill", "decode-1": "decode", "decode-2": "decode"}
    for wrong in (["--prefill=1"], ["--decode=1"], ["--replicas=2", "--prefill=1", "--decode=1"]):
        assert main(wrong) == 2
        assert "--prefill and --decode go together" in capsys.readouterr().err


class DyingServer:
    """A process that ends immediately."""

    def __init__(self, folder, port):
        self.port = port or 7000
        self.log = folder / "replica.log"
        self.log.write_text("last words")
        self.process = SimpleNamespace(poll=lambda: 1, returncode=1)

    def stop(self):
        pass


def test_a_replica_that_has_ended_is_started_again_at_its_port_less_and_less_often(tmp_path, monkeypatch, capsys):
    clock, starts = Clock(), []
    monkeypatch.setattr(cluster, "time", SimpleNamespace(monotonic=clock))

    def start(port):
        starts.append((clock.now, port))
        return DyingServer(tmp_path, port)

    part = Part("replica-1", start)
    for _ in range(400):
        clock.now += 0.5
        part.watch()
    times, ports = zip(*starts, strict=True)
    pauses = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert pauses == pytest.approx([1.5, 2.5, 4.5, 8.5, 16.5, 32.5, 60.5, 60.5], abs=0.51)
    assert ports == (None, *[7000] * (len(starts) - 1))
    said = capsys.readouterr().err
    assert f"replica-1 has ended with 1; its log is {tmp_path}/replica.previous.log" in said
    assert (tmp_path / "replica.previous.log").read_text() == "last words"
