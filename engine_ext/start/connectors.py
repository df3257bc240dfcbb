# SPDX-License-Identifier: Apache-2.0
"""vLLM's other KV connectors: which may run beside the chunk cache's, and how."""

import logging
from contextlib import suppress
from dataclasses import asdict
from enum import StrEnum
from typing import Any, Final

from vllm import envs
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.engine.arg_utils import AsyncEngineArgs

from engine_ext.start.plugin import PREFIX_SPEC, keep_prefixes
from engine_ext.wire.vllm_compat import IS_ASCENDS

logger = logging.getLogger(__name__)

Child = dict[str, Any]
"""Configuration of one connector of vLLM's ``MultiConnector``."""


class Addressing(StrEnum):
    """The address by which a connector finds KV. All but ``TOKENS`` tell composed KV from plain KV."""

    REQUEST = "by request"
    BLOCK_HASHES = "by vLLM's block hashes"
    TOKENS = "by token ids"


ADDRESSING: Final = {
    "NixlConnector": Addressing.REQUEST,
    "NixlPullConnector": Addressing.REQUEST,
    "NixlPushConnector": Addressing.REQUEST,
    "MooncakeConnector": Addressing.REQUEST,
    "MoRIIOConnector": Addressing.REQUEST,
    "OffloadingConnector": Addressing.BLOCK_HASHES,
    "SimpleCPUOffloadConnector": Addressing.BLOCK_HASHES,
    "MooncakeStoreConnector": Addressing.BLOCK_HASHES,
    "ExampleConnector": Addressing.TOKENS,
    "LMCacheConnectorV1": Addressing.TOKENS,
    "LMCacheMPConnector": Addressing.TOKENS,
    "HF3FSKVConnector": Addressing.TOKENS,
}
"""vLLM's connectors, read off their sources (docs/connectors.md says which were run)."""
_BY_TOKENS: Final = "it finds KV by token ids, which are the same whether or not chunks saw one another"
_UNKNOWN: Final = (
    "not known to find KV by request or by vLLM's block hashes, so it may take KV over chunks for plain KV"
)
_OF_THE_WHOLE: Final = ("engine_id", "kv_load_failure_policy")
"""Fields that ``MultiConnector`` has, not its connectors."""
_UNTRIED: Final = "vLLM-Ascend's vLLM was not tried with several connectors"
_ON_FAILURE: Final = "fail"
"""Never mixes recomputed and composed KV in one request: it runs again in full attention."""


def others_reason(args: AsyncEngineArgs) -> str | None:
    """The reason against the chunk cache beside the connectors that the user asked for."""
    others = other_connectors(args)
    flag = "--kv-offloading-size" if args.kv_offloading_size is not None else "--kv-transfer-config"
    if not others:
        return f"{flag}: it names no connector" if args.kv_transfer_config is not None else None
    if IS_ASCENDS:
        return f"{flag}: {_UNTRIED}"
    reasons = [f"{name}: {reason}" for name in map(_name, others) if (reason := _reason(name)) is not None]
    return f"{flag}: {'; '.join(reasons)}" if reasons else None


def other_connectors(args: AsyncEngineArgs) -> list[Child]:
    """The connectors that the user asked for, by ``--kv-transfer-config`` or ``--kv-offloading-size``."""
    config = args.kv_transfer_config
    if args.kv_offloading_size is not None:
        return [_offloading(args, config)]
    if config is None:
        return []
    if config.kv_connector == "MultiConnector":
        return _children(config)
    return [_child(config)]


def pass_on_blocks(config: KVTransferConfig | None) -> list[str]:
    """The attached connectors that send a request's blocks to other engines."""
    return [name for name in map(_name, _children(config)) if ADDRESSING.get(name) is Addressing.REQUEST]


def attach_connector(
    args: AsyncEngineArgs, class_path: str, extra_config: dict[str, Any], prefix_folder: str | None = None
) -> None:
    """Attaches the connector of ``class_path``, alone or before the user's.

    It comes before them, since the first connector that has KV for a request loads it, and others may have less. With
    ``prefix_folder``, vLLM's ``OffloadingConnector`` keeps prefixes in the workers' tiers, if it can; it comes first,
    and has all chunks of a prompt or nothing.
    """
    module_path, _, name = class_path.rpartition(".")
    ours = {
        "kv_connector": name,
        "kv_connector_module_path": module_path,
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra_config,
    }
    others = other_connectors(args)
    prefixes = [_prefixes(prefix_folder)] if prefix_folder is not None and _can_keep_prefixes(args, others) else []
    if not others and not prefixes:
        args.kv_transfer_config = KVTransferConfig(**ours, kv_load_failure_policy=_ON_FAILURE)
        return
    with suppress(ValueError):  # it is registered already
        KVConnectorFactory.register_connector(name, module_path, name)
    args.kv_transfer_config = KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        engine_id=args.kv_transfer_config.engine_id if args.kv_transfer_config is not None else None,
        kv_connector_extra_config={"connectors": [*prefixes, ours, *others]},
        kv_load_failure_policy=_ON_FAILURE,
    )
    args.kv_offloading_size = None  # vLLM would put its connector in the place of all


def keeps_prefixes(config: KVTransferConfig | None) -> bool:
    """Whether :func:`attach_connector` added the connector that keeps prefixes in tiers."""
    extras = [child.get("kv_connector_extra_config", {}) for child in _children(config)]
    return any(extra.get("spec_name") == PREFIX_SPEC for extra in extras)


def _can_keep_prefixes(args: AsyncEngineArgs, others: list[Child]) -> bool:
    """Whether tiers can keep prefixes, which vLLM's block hashes name."""
    checks = [
        (IS_ASCENDS, _UNTRIED),
        (
            "sha256" not in str(args.prefix_caching_hash_algo),
            "--prefix-caching-hash-algo: hashes differ between processes, or clients could forge them",
        ),
        (any(ADDRESSING[_name(other)] is Addressing.BLOCK_HASHES for other in others), "another connector keeps them"),
    ]
    reason = next((reason for holds, reason in checks if holds), None)
    if reason is not None:
        logger.warning("only chunks are kept in tiers, not other prompts: %s", reason)
    return reason is None


def _prefixes(folder: str) -> Child:
    """The connector that keeps prefixes in tiers."""
    keep_prefixes()
    extra = {"spec_name": PREFIX_SPEC, "folder": folder, "offload_prompt_only": False}
    return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


def _reason(name: str) -> str | None:
    addressing = ADDRESSING.get(name)
    if addressing is None:
        return _UNKNOWN
    return _BY_TOKENS if addressing is Addressing.TOKENS else None


def _name(child: Child) -> str:
    return str(child.get("kv_connector"))


def _children(config: KVTransferConfig | None) -> list[Child]:
    """The connectors of a ``MultiConnector``; none of another connector."""
    return list(config.kv_connector_extra_config.get("connectors", ())) if config is not None else []


def _child(config: KVTransferConfig) -> Child:
    return {name: value for name, value in asdict(config).items() if name not in _OF_THE_WHOLE}


def _offloading(args: AsyncEngineArgs, config: KVTransferConfig | None) -> Child:
    """The connector that vLLM runs for ``--kv-offloading-size``."""
    if args.kv_offloading_backend != "native":
        return {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both"}
    extra = config.kv_connector_extra_config if config is not None else {}
    return {
        "kv_connector": "SimpleCPUOffloadConnector" if envs.VLLM_USE_SIMPLE_KV_OFFLOAD else "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {**extra, "cpu_bytes_to_use": args.kv_offloading_size * (1 << 30)},
    }
