# SPDX-License-Identifier: Apache-2.0
"""The wheel, installed beside this environment's packages, without the checkout."""

import os
import subprocess
import sys
import tomllib
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

from app.commands.doctor.environment import PACKAGES
from machine.http_client import http_client
from machine.server_process import ROOT, free_port
from tests.support.waiting import is_healthy, until

Run = Callable[..., "subprocess.CompletedProcess[str]"]
FACT = "The access code of Falcon is 7342. The owner of Falcon is Mira Tolan. The budget of Falcon is 64 euros."
_SITE = [path for path in sys.path if Path(path).name == "site-packages"]
_WATCH = """
import os, sys

def _note(event, arguments):
    path = arguments[0] if event == "open" else None
    if isinstance(path, (str, bytes)) and os.path.realpath(os.fsdecode(path)).startswith({root!r}):
        if not os.path.realpath(os.fsdecode(path)).startswith({site!r}):
            os.write(_opened, os.fsencode(path) + b"\\n")

_opened = os.open({opened!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
sys.addaudithook(_note)
"""


def test_the_packages_are_those_that_the_doctor_looks_for() -> None:
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert {*PACKAGES, "models"} == set(wheel["packages"])


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with the names of files in the checkout that any process of the wheel has opened."""
    return tmp_path_factory.mktemp("opened") / "names"


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory, opened: Path) -> Path:
    """The folder of programs of an environment with the wheel."""
    pytest.importorskip("hatchling", reason="hatchling is not installed")
    folder = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "--quiet")
    built = ("wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(folder), str(ROOT))
    subprocess.run([*pip, *built], check=True)
    (wheel,) = folder.glob("*.whl")
    venv.create(folder / "venv", with_pip=False)
    scripts = folder / "venv" / "bin"
    subprocess.run([*pip, "--python", str(scripts / "python"), "install", "--no-deps", "--no-index", wheel], check=True)
    (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
    # These folders alone are added: an editable installation's .pth in them is not read.
    (site / "shared.pth").write_text("\n".join(_SITE))
    watched = tuple(os.path.realpath(each) for each in _SITE)
    (site / "watch.py").write_text(_WATCH.format(root=f"{ROOT}/", site=watched, opened=str(opened)))
    (site / "watch.pth").write_text("import watch\n")
    return scripts


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of another project, whose modules have names of Tessera's packages."""
    other = tmp_path_factory.mktemp("other")
    (other / "web").mkdir()
    for module in ("app.py", "cache.py", "web/__init__.py"):
        (other / module).write_text("raise RuntimeError('of another project')\n")
    return other


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return environment | {"TESSERA_HOME": str(tmp_path_factory.mktemp("home")), "PIP_NO_INDEX": "1", "COLUMNS": "140"}


@pytest.fixture(scope="module")
def run(scripts: Path, other: Path, environment: dict[str, str]) -> Run:
    """Runs a program in the other project's folder."""

    def run(program: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
        command = [str(scripts / program), *arguments]
        return subprocess.run(command, cwd=other, env=environment, capture_output=True, text=True, timeout=400)

    return run


@pytest.mark.matrix
def test_files_of_the_checkout_and_modules_of_the_other_project_would_be_noticed(run: Run, opened: Path) -> None:
    file = str(ROOT / "README.md")
    ran = run("python", "-c", f"open({file!r})")
    assert ran.returncode == 0, ran.stderr
    assert opened.read_text().splitlines() == [file]
    opened.write_text("")
    # Where Python looks into the folder first.
    assert "of another project" in run("python", "-m", "app.cli").stderr


@pytest.mark.matrix
def test_its_commands_are_there(run: Run) -> None:
    helped = run("tessera", "--help")
    assert helped.returncode == 0, helped.stderr
    assert "usage: tessera serve" in helped.stdout


@pytest.mark.engine
@pytest.mark.matrix
def test_the_doctor_finds_nothing_wrong(run: Run, opened: Path) -> None:
    ran = run("tessera", "doctor", "--enforce-eager", "--max-model-len", "2048", "--port", str(free_port()))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "Chunks are reused" in ran.stdout
    assert opened.read_text() == ""


@pytest.mark.engine
@pytest.mark.matrix
def test_the_demo_answers_from_its_documents(run: Run, opened: Path) -> None:
    ran = run("tessera", "demo", "--once", "--port", str(free_port()))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.count("The access code of Falcon is 7342.") == 2  # with chunks reused, and in full attention
    assert opened.read_text() == ""


@pytest.mark.engine
@pytest.mark.matrix
def test_a_server_answers(scripts: Path, other: Path, environment: dict[str, str], opened: Path) -> None:
    (model,) = (scripts.parent / "lib").glob("python*/site-packages/models/demo")
    port = str(free_port())
    flags = ("--port", port, "--enforce-eager", "--chunk-cache", "require")
    command = [str(scripts / "tessera"), "serve", str(model), *flags]
    log = other / "log"
    with log.open("w") as output, http_client(f"http://127.0.0.1:{port}", timeout=60) as client:
        server = subprocess.Popen(command, cwd=other, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            until(lambda: is_healthy(client) or server.poll() is not None, 300)
            assert server.poll() is None, log.read_text()
            asked = {"chunks": [FACT], "question": "What is the access code of Falcon?"}
            answer = client.post("/v1/rag/chat", json={**asked, "max_tokens": 16, "cache": {"mode": "chunked"}}).json()
        finally:
            server.terminate()
            server.wait(60)
    assert "7342" in answer["choices"][0]["message"]["content"], answer
    assert opened.read_text() == ""
