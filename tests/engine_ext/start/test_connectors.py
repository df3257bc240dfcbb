# SPDX-License-Identifier: Apache-2.0
"""The chunk cache's connector among those that the user asked for."""

from pathlib import Path
from typing import Any

import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.engine.arg_utils import AsyncEngineArgs

from engine_ext.start.connectors import ADDRESSING, attach_connector

OURS = "engine_ext.core.connector.ChunkCacheConnector"


def attached(model: Path, **flags: Any) -> KVTransferConfig:
    args = AsyncEngineArgs(model=str(model), **flags)
    attach_connector(args, OURS, {"pool_bytes": 1})
    assert args.kv_offloading_size is None
    assert args.kv_transfer_config.kv_load_failure_policy == "fail"
    return args.kv_transfer_config


def children(config: KVTransferConfig) -> list[KVTransferConfig]:
    """The connectors as vLLM's MultiConnector reads them."""
    assert config.kv_connector == "MultiConnector"
    parts = config.kv_connector_extra_config["connectors"]
    return [KVTransferConfig(**part, engine_id=config.engine_id) for part in parts]


def test_alone_and_with_what_was_given(tiny_llama: Path) -> None:
    config = attached(tiny_llama)
    assert (config.kv_connector, config.kv_connector_extra_config) == ("ChunkCacheConnector", {"pool_bytes": 1})
    given = KVTransferConfig(**NIXL, engine_id="theirs", kv_load_failure_policy="recompute")
    assert [each.engine_id for each in children(attached(tiny_llama, kv_transfer_config=given))] == ["theirs"] * 2


NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_producer", "kv_connector_extra_config": {"lease": 7}}
OFFLOADING = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": {}}
SEVERAL = {
    "kv_connector": "MultiConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"connectors": [NIXL, OFFLOADING]},
}


@pytest.mark.parametrize(
    ("flags", "others"),
    [
        ({"kv_transfer_config": KVTransferConfig(**NIXL)}, [NIXL]),
        ({"kv_transfer_config": KVTransferConfig(**SEVERAL)}, [NIXL, OFFLOADING]),
        ({"kv_offloading_size": 2.0}, [{**OFFLOADING, "kv_connector_extra_config": {"cpu_bytes_to_use": 2 << 30}}]),
    ],
    ids=["another", "several", "that of kv_offloading_size"],
)
def test_before_others(tiny_llama: Path, flags: dict[str, Any], others: list[dict[str, Any]]) -> None:
    ours, *found = children(attached(tiny_llama, **flags))
    assert (ours.kv_connector, ours.kv_connector_extra_config) == ("ChunkCacheConnector", {"pool_bytes": 1})
    assert [{name: getattr(each, name) for name in NIXL} for each in found] == others


def test_the_table_has_connectors_of_vllm() -> None:
    assert set(ADDRESSING) <= set(KVConnectorFactory._registry)
