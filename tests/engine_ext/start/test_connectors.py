# SPDX-License-Identifier: Apache-2.0
"""The chunk cache's connector among those that the user asked for."""

from typing import Any

import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.engine.arg_utils import AsyncEngineArgs

from app.models.random_model import build_preset
from engine_ext.start.connectors import ADDRESSING, attach_connector

OURS = "engine_ext.core.connector.ChunkCacheConnector"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build_preset("tiny-llama", tmp_path_factory.mktemp("connectors") / "model"))


def attached(model: str, **flags: Any) -> KVTransferConfig:
    args = AsyncEngineArgs(model=model, **flags)
    attach_connector(args, OURS, {"pool_bytes": 1})
    assert args.kv_offloading_size is None
    assert args.kv_transfer_config.kv_load_failure_policy == "fail"
    return args.kv_transfer_config


def children(config: KVTransferConfig) -> list[KVTransferConfig]:
    """The connectors as vLLM's MultiConnector reads them."""
    assert config.kv_connector == "MultiConnector"
    parts = config.kv_connector_extra_config["connectors"]
    return [KVTransferConfig(**part, engine_id=config.engine_id) for part in parts]


def test_alone(model: str) -> None:
    config = attached(model)
    assert (config.kv_connector, config.kv_connector_extra_config) == ("ChunkCacheConnector", {"pool_bytes": 1})


def test_before_another_whose_engine_id_stays(model: str) -> None:
    extra = {"kv_lease_duration": 7}
    nixl = KVTransferConfig(
        kv_connector="NixlConnector",
        kv_role="kv_producer",
        engine_id="theirs",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config=extra,
    )
    config = attached(model, kv_transfer_config=nixl)
    ours, theirs = children(config)
    assert (ours.kv_connector, ours.kv_connector_extra_config) == ("ChunkCacheConnector", {"pool_bytes": 1})
    assert (theirs.kv_connector, theirs.kv_role, theirs.engine_id) == ("NixlConnector", "kv_producer", "theirs")
    assert theirs.kv_connector_extra_config == extra


def test_before_several(model: str) -> None:
    parts = [
        {"kv_connector": "NixlConnector", "kv_role": "kv_both"},
        {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"},
    ]
    multi = KVTransferConfig(
        kv_connector="MultiConnector", kv_role="kv_both", kv_connector_extra_config={"connectors": parts}
    )
    names = [each.kv_connector for each in children(attached(model, kv_transfer_config=multi))]
    assert names == ["ChunkCacheConnector", "NixlConnector", "OffloadingConnector"]


def test_before_the_connector_of_kv_offloading_size(model: str) -> None:
    _, theirs = children(attached(model, kv_offloading_size=2.0))
    assert (theirs.kv_connector, theirs.kv_connector_extra_config) == (
        "OffloadingConnector",
        {"cpu_bytes_to_use": 2 << 30},
    )


@pytest.mark.parametrize("name", ADDRESSING)
def test_the_table_has_connectors_of_vllm(name: str) -> None:
    assert name in KVConnectorFactory._registry
