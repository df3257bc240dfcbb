# SPDX-License-Identifier: Apache-2.0
"""A model's files, and what identifies their contents."""

import hashlib
from pathlib import Path
from typing import Final

import xxhash
from huggingface_hub import snapshot_download

_SUFFIXES: Final = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".py"})
PROFILE_NAME: Final = "profile.json"
"""A profile (``tessera calibrate``) in its model's folder, and the end of such names; no part of the model."""


class UnknownWeightsError(Exception):
    """A model's weights can't be identified; the message says why."""


def files_digest(folder: Path) -> str:
    """Digest of the contents of all files of weights, code and configuration.

    Reads all files. JSON in subfolders is ignored: results, or the same model in another format.
    """
    digest = xxhash.xxh3_128()
    paths = [path for path in folder.rglob("*") if path.suffix in _SUFFIXES]
    paths += [path for path in folder.glob("*.json") if not path.name.endswith(PROFILE_NAME)]
    for path in sorted(filter(Path.is_file, paths)):
        with path.open("rb") as file:
            contents = hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
        digest.update(f"{path.relative_to(folder).as_posix()}\n{contents}\n".encode())
    return digest.hexdigest()


def model_folder(model: str, revision: str | None, download_dir: str | None = None) -> Path:
    """Folder of a model's files, from a path or a name in the model hub; raises :class:`UnknownWeightsError`.

    ``revision`` and ``download_dir`` are vLLM's flags.
    """
    path = Path(model)
    if path.is_dir():
        return path
    try:
        return Path(snapshot_download(model, revision=revision, cache_dir=download_dir, local_files_only=True))
    except Exception as error:  # of many types, some of other libraries
        raise UnknownWeightsError(f"no files of {model} on this machine: {error}") from error
