# SPDX-License-Identifier: Apache-2.0
"""docker/*.Dockerfile: versions match pyproject.toml, no root user, and all three agree."""

import re
import subprocess
import tomllib

import pytest

from machine.server_process import ROOT
from tests.docker.deployment import DOCKER, PROFILES, base_image, instructions, program

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WHEEL = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
SETUP = (ROOT / "scripts" / "setup.sh").read_text()
IGNORED = (ROOT / ".dockerignore").read_text().splitlines()


@pytest.fixture(params=PROFILES)
def name(request):
    return request.param


def pinned(extra: str, package: str) -> str:
    (needed,) = [each for each in PROJECT["optional-dependencies"][extra] if each.startswith(f"{package}==")]
    return needed.split("==")[1]


def install(name: str) -> str:
    (command,) = [each.value[0] for each in instructions(name)["RUN"] if re.search(f'"/src.{name}', each.value[0])]
    return command


def test_every_dockerfile_is_tested_and_has_a_base_image_of_the_version_of_its_extra():
    assert {path.name for path in DOCKER.glob("*Dockerfile*")} == {f"{profile}.Dockerfile" for profile in PROFILES}
    assert base_image("cuda") == f"vllm/vllm-openai:v{pinned('cuda', 'vllm')}"
    assert base_image("ascend") == f"ascend/vllm-ascend:v{pinned('ascend', 'vllm-ascend')}"
    python = re.fullmatch(r"python:(3\.\d+)-slim-\w+", base_image("cpu"))[1]
    assert f"Programming Language :: Python :: {python}" in PROJECT["classifiers"]


def test_the_extra_of_the_same_name_is_installed(name):
    assert name in PROJECT["optional-dependencies"]
    assert re.search(rf'"/src\[{name}(,models)?\]"', install(name))


def test_the_cpu_image_is_set_up_as_scripts_setup_sh_does():
    (index,) = re.findall(r'--extra-index-url "\$\((.*?)\)"', install("cpu"))
    command = ["sh", "-c", index.replace("/src", str(ROOT / "scripts"))]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert said == re.search(r"^CPU_WHEELS=(https://\S+\n)", SETUP, re.MULTILINE)[1]
    (removed,) = re.findall(r"^ *pip uninstall -y (.*?) \|\|", SETUP, re.MULTILINE)
    assert install("cpu").endswith(f"pip uninstall --yes {removed} triton")
    (added,) = [each.value[0] for each in instructions("cpu")["RUN"] if "apt-get" in each.value[0]]
    packages = added.partition("--no-install-recommends ")[2].partition(" &&")[0]
    assert f"'apt-get install {packages.strip()}'" in SETUP


def test_changed_files_are_seen_but_code_does_not_install_everything_again(name):
    """Podman's cache does not look into mounts of the build context."""
    assert not any("type=bind" in flag for each in instructions(name)["RUN"] for flag in each.flags)
    dependencies = next(each for each in instructions(name)["COPY"] if "pyproject.toml" in each.value)
    assert set(dependencies.value) - {"scripts/setup.sh"} == {"pyproject.toml", "README.md", "LICENSE", "/src/"}


def test_labels_describe_the_project(name):
    (label,) = instructions(name)["LABEL"]
    assert dict(re.findall(r'org\.opencontainers\.image\.(\w+)="(.*?)"', label.original)) == {
        "title": "Tessera",
        **{key: PROJECT[key] for key in ("description", "version")},
        "licenses": PROJECT["license"],
    }


def test_it_serves_where_its_health_is_checked_with_the_chunk_cache_and_not_as_root(name):
    found = instructions(name)
    (check,), (exposed,), (user,) = found["HEALTHCHECK"], found["EXPOSE"], found["USER"]
    assert check.value == ("CMD", "python3", "/opt/tessera/docker/health.py", exposed.value[0])
    assert exposed.value == ("8000",)  # vLLM's own default
    assert {"--interval=10s", "--timeout=5s", "--start-period=10m"} == set(check.flags)
    assert found["ENV"][0].value[-2:] == ("TESSERA_CHUNK_CACHE", "require")
    (made,) = [each for each in found["RUN"] if "useradd" in each.value[0]]
    assert f"--uid {user.value[0]} " in made.value[0]
    assert user.value == ("10001",)
    assert max(each.start_line for each in found["RUN"]) < user.start_line


def test_arguments_replace_those_of_serving_the_demo_model(name):
    found = instructions(name)
    (entry,), (command,) = found["ENTRYPOINT"], found["CMD"]
    assert entry.json
    assert command.json
    assert command.value == ("serve", "--host", "0.0.0.0")
    # On Ascend within the environment that CANN needs.
    sourced = ("/bin/bash", "-c", 'source /etc/profile && exec tessera "$@"', "tessera")
    assert entry.value == (sourced if name == "ascend" else ("tessera",))
    assert "tessera" in PROJECT["scripts"]


def test_the_build_context_is_what_the_wheel_and_the_images_need():
    ignored, allowed, again = IGNORED.index("*"), [line[1:] for line in IGNORED if line.startswith("!")], IGNORED[-1]
    assert ignored == 1  # behind the comment: everything, but for what follows
    assert again == "**/__pycache__"
    packages = {package for package in WHEEL["packages"] if (ROOT / package).is_dir()}
    named = {"pyproject.toml", PROJECT["readme"], *PROJECT["license-files"]}
    assert set(allowed) == packages | named | {"scripts", "docker/health.py"}
    assert all((ROOT / path).exists() for path in allowed)


@pytest.mark.skipif(program("hadolint") is None, reason="hadolint is not installed")
def test_hadolint_finds_nothing(name):
    # DL3008, DL3013: base image and pyproject.toml pin versions.
    command = [program("hadolint"), "--ignore", "DL3008", "--ignore", "DL3013", str(DOCKER / f"{name}.Dockerfile")]
    subprocess.run(command, check=True)
