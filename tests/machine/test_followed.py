# SPDX-License-Identifier: Apache-2.0
"""Lines of a file that is being written."""

import threading

from machine.followed import echoed, followed


def test_whole_lines_are_taken_while_they_come_and_at_the_end(tmp_path):
    log, taken, first = tmp_path / "log", [], threading.Event()
    log.write_text("one\nha")
    with followed(log, lambda line: (taken.append(line), first.set())):
        assert first.wait(30)
        assert taken == ["one"]
        with log.open("a") as more:
            more.write("lf\nno end")
    assert taken == ["one", "half"]


def test_a_servers_results_and_warnings_are_repeated_and_its_clock_is_not(tmp_path, capsys):
    log = tmp_path / "log"
    log.write_text(
        "tessera: loading …\ntessera: loading … 5 s\ntessera: loading: 7.0 s\n(EngineCore pid=1) WARNING x\n"
    )
    with echoed(log, "replica-1: "):
        pass
    assert capsys.readouterr() == ("", "replica-1: tessera: loading: 7.0 s\nreplica-1: (EngineCore pid=1) WARNING x\n")
