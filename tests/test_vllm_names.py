# SPDX-License-Identifier: Apache-2.0
"""scripts/check_vllm_names.py: correct for the installed vLLM, and detects missing names."""

import ast
import importlib.util
from pathlib import Path

import pytest

from scripts.check_vllm_names import VllmSources, problems

SITE_PACKAGES = Path(importlib.util.find_spec("vllm").origin).parents[1]
INSTALLED = VllmSources(SITE_PACKAGES)


class Changed(VllmSources):
    """The installed vLLM, with ``old`` replaced by ``new`` in one module."""

    def __init__(self, module: str, old: str, new: str):
        super().__init__(SITE_PACKAGES)
        self._trees = dict(INSTALLED._trees)  # they take long to parse
        path = SITE_PACKAGES.joinpath(*module.split("."))
        source = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
        assert old in source
        self._trees[module] = ast.parse(source.replace(old, new))


def test_the_installed_version_has_everything():
    assert list(problems(INSTALLED)) == []


@pytest.mark.parametrize(
    ("module", "old", "new", "message"),
    [
        ("vllm.exceptions", "class VLLMValidationError", "class Other", "vllm.exceptions has no VLLMValidationError"),
        ("vllm.inputs.engine", "cache_salt: str", "salt: str", "tokens_input takes no cache_salt"),
        ("vllm.v1.engine.async_llm", "def collective_rpc", "def rpc", "AsyncLLM has no collective_rpc"),
        ("vllm.v1.engine.async_llm", "args: tuple", "arguments: tuple", "collective_rpc takes no args"),
        ("vllm.v1.engine.async_llm", "self.output_processor =", "self.out =", "AsyncLLM has no output_processor"),
        ("vllm.v1.request", "self._block_hasher", "self._hasher", "Request has no _block_hasher"),
        ("vllm.v1.core.block_pool", "def insert(", "def put(", "BlockHashToBlockMap has no insert"),
        ("vllm.config", "KVTransferConfig", "Other", "vllm.config has no KVTransferConfig"),
        (
            "vllm.config.kv_transfer",
            "kv_load_failure_policy",
            "policy",
            "KVTransferConfig takes no kv_load_failure_policy",
        ),
        (
            "vllm.distributed.kv_transfer.kv_connector.v1.base",
            "def on_new_request(",
            "def on_request(",
            "KVConnectorBase_V1 has no on_new_request",
        ),
        (
            "vllm.distributed.kv_transfer.kv_connector.v1.base",
            "def wait_for_save(self)",
            "def wait_for_save(self, step)",
            "ChunkCacheConnector.wait_for_save does not take what KVConnectorBase_V1's does",
        ),
        (
            "vllm.distributed.kv_transfer.kv_connector.v1.base",
            "def wait_for_save(",
            "def wait_for_saves(",
            "ChunkCacheConnector lacks wait_for_saves",
        ),
    ],
)
def test_what_is_missing_is_noticed(module, old, new, message):
    found = list(problems(Changed(module, old, new)))
    assert any(message in each for each in found), found
