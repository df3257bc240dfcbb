# SPDX-License-Identifier: Apache-2.0
"""Functions in torch's threads: parts, errors, and the cores that they run on."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from kernels.threads import in_torch_threads

_CORES = """\
import os
import torch
from kernels.threads import in_torch_threads
torch.set_num_threads(2)
found = {}
in_torch_threads(lambda first, end: found.update({first: os.sched_getaffinity(0)}), 2)
print([sorted(found[part]) for part in sorted(found)])
"""

_ALONE = """\
import os, threading
import torch
from kernels.threads import use_one_thread
torch.set_num_threads(2)
torch.ones(1 << 20).sum()
torch.set_num_threads = lambda number: None  # as vLLM does
os.sched_setaffinity(0, [0, 1])  # the next thread has both
def work():
    use_one_thread()
    torch.zeros(1 << 20).copy_(torch.ones(1 << 20))
    print(sorted(os.sched_getaffinity(0)), torch.get_num_threads())
thread = threading.Thread(target=work)
thread.start()
thread.join()
os.sched_setaffinity(0, [0, 1])
torch.zeros(1 << 20).copy_(torch.ones(1 << 20))
print(torch.get_num_threads())
"""


@pytest.fixture(autouse=True)
def three_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the machine and the tests' own setting."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)


def parts(count: int) -> list[tuple[int, int]]:
    """The parts of a range, in order."""
    found: list[tuple[int, int]] = []
    in_torch_threads(lambda first, end: found.append((first, end)), count)
    return sorted(found)


@pytest.mark.parametrize("count", [1, 2, 3, 8, 13])
def test_each_part_once(count):
    found = parts(count)
    assert [number for part in found for number in range(*part)] == list(range(count))
    assert len(found) == min(count, torch.get_num_threads())


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_is_raised(failing):
    def compute(first, end):
        if first <= failing < end:
            raise ValueError("this part")

    with pytest.raises(ValueError, match="this part"):
        in_torch_threads(compute, 2)


def test_from_another_thread_and_with_one_thread_within_a_part():
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(parts, 4).result() == parts(4)
    # OpenMP's regions don't nest: the inner range must be complete all the same.
    found = []
    in_torch_threads(lambda first, end: found.append(parts(3)), 2)
    assert all([number for part in each for number in range(*part)] == [0, 1, 2] for each in found)


def told_with_bound_threads(script: str) -> str:
    """Output of a script whose OpenMP threads are bound to two cores."""
    cores = [0, 1]
    if (os.cpu_count() or 1) < 2:
        pytest.skip("one core")
    bound = {"GOMP_CPU_AFFINITY": " ".join(map(str, cores)), "OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, **bound},
        # pytest's workers have a core each; an engine before may have set LD_PRELOAD, so OpenMP binds at once.
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_threads_run_on_the_cores_that_torchs_are_bound_to_and_one_alone_on_every_core():
    assert told_with_bound_threads(_CORES) == "[[0], [1]]"
    assert told_with_bound_threads(_ALONE).split("\n") == ["[0, 1] 1", "2"]
