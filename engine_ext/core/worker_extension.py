# SPDX-License-Identifier: Apache-2.0
"""Methods that vLLM adds to each of its workers, called from the app by ``collective_rpc``."""

import itertools
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from vllm.distributed.parallel_state import get_pp_group
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec

from cache.tiers.signed import TierKey
from engine_ext.core import ascend
from engine_ext.core.attention.decoding import LEAST_BLOCKS, DecodingSelection
from engine_ext.core.attention.probes import Measured, Probes
from engine_ext.core.attention.requests import attention_reason
from engine_ext.core.connector import chunk_connector
from engine_ext.core.file_server import TransferServer, listen, make_chain, on_all_cores
from engine_ext.core.layers import UnsupportedModelError, attention_layers, specs_of
from engine_ext.core.lora import group_adapters
from engine_ext.core.worker import PoolDescription, PoolSizeError, WorkerHalf
from engine_ext.wire.prefix import blocks_address
from engine_ext.wire.vllm_compat import IS_ASCENDS, draft_model_of
from kernels.layout import LayoutProbeError
from kernels.paged import UnsupportedKVError
from kernels.selection import POLICIES
from machine.process_watch import unlink_shared_memory

if TYPE_CHECKING:
    from vllm.config import VllmConfig


logger = logging.getLogger(__name__)

_DROPPED: Final = "layers with windows drop blocks"


class ChunkCacheWorkerExtension:
    """Mixed into vLLM's worker class (``worker_extension_cls``)."""

    if TYPE_CHECKING:
        model_runner: Any
        rank: int
        vllm_config: VllmConfig
        _maybe_get_memory_pool_context: Callable[..., AbstractContextManager[Any]]

    def chunk_cache_prepare(self) -> dict[str, Any]:
        """Probes the layout and allocates the pool.

        Returns the pool's description as a dict, or ``{"reason": why not}``.
        """
        unlink_shared_memory()
        connector = chunk_connector()
        half = _worker_half()
        if reason := _unsupported_groups(connector.kv_cache_groups):
            return {"reason": reason}
        if half.tables and IS_ASCENDS:
            return {"reason": f"{_DROPPED}, after which vLLM-Ascend's vLLM can't fail a load"}
        try:
            return asdict(self._prepare(half))
        except LayoutProbeError as error:
            reason = f"vLLM keeps keys and values in a layout that Tessera can't read: {error}"
        except (UnsupportedModelError, UnsupportedKVError, PoolSizeError) as error:
            reason = str(error)
        except Exception as error:
            # Unforeseen behaviour of a model or backend: serve without the cache, with the reason.
            logger.exception("the chunk cache could not be prepared")
            reason = f"{type(error).__name__}: {error}"
        half.release()
        return {"reason": reason}

    @property
    def _modules(self) -> dict[str, Any]:
        """vLLM's attention modules by name."""
        modules: dict[str, Any] = self.vllm_config.compilation_config.static_forward_context
        return modules

    def _request_ids(self, indices: Sequence[int] | None) -> list[str]:
        """The requests of a step's rows, in order.

        By their ``indices`` in the table of model runner V2; V1 has the step's batch instead.
        """
        if indices is None:
            return list(self.model_runner.input_batch.req_ids)
        return [self.model_runner.req_states.index_to_req_id[int(index)] for index in indices]

    def _prompts(self, request_ids: Sequence[str]) -> list[int]:
        """The lengths of requests' prompts, by model runner V2 or V1."""
        if (states := getattr(self.model_runner, "req_states", None)) is not None:
            return [int(states.prompt_len.np[states.req_id_to_index[name]]) for name in request_ids]
        return [self.model_runner.requests[name].num_prompt_tokens for name in request_ids]

    def _prepare(self, half: WorkerHalf) -> PoolDescription:
        half.readers.request_ids = self._request_ids
        half.check_room(ascend.free_bytes())
        modules = self._modules
        model, drafter = self.model_runner.get_model(), draft_model_of(self.model_runner)
        if current_platform.is_cpu() and self.vllm_config.lora_config is not None:
            group_adapters(model)
        if not ascend.is_ascend():
            with self._maybe_get_memory_pool_context(tag=ascend.POOL_TAG):
                return half.prepare(attention_layers(model, modules, half.kv_caches, drafter))
        if reason := ascend.unsupported_reason(self.vllm_config):
            raise UnsupportedModelError(reason)
        layers = attention_layers(model, modules, half.kv_caches, drafter)
        with ascend.pool_memory(self.vllm_config):
            return half.prepare(layers, ascend.reshape_and_cache())

    def chunk_cache_in_place_reason(self) -> str | None:
        """The reason why requests can't share blocks, if any."""
        return _DROPPED if _worker_half().tables else None

    def chunk_cache_attention_reason(self) -> str | None:
        """The reason why attention layers can't read more, or less, than the requests' blocks, if any."""
        return attention_reason({name: self._modules[name] for name in _worker_half().kv_caches})

    def chunk_cache_decoding_reason(self) -> str | None:
        """The reason why attention layers can't read fewer blocks than the requests have, if any."""
        impls = (self._modules[name].impl for name in _worker_half().kv_caches)
        unable = (type(impl).__name__ for impl in impls if not getattr(impl, "reads_some_blocks", False))
        reason = self.chunk_cache_attention_reason()
        return reason or next((f"{name} reads all blocks of a request" for name in unable), None)

    def chunk_cache_prepare_attention(self) -> str | None:
        """Lets requests attend to the pool; returns the reason if they can't. After :meth:`chunk_cache_prepare`."""
        half = _worker_half()
        if reason := self.chunk_cache_attention_reason():
            return reason
        try:
            half.prepare_attention(list(half.kv_caches))
        except UnsupportedKVError as error:
            return str(error)
        return None

    def chunk_cache_prepare_probes(self, layers: Sequence[int]) -> str | None:
        """Let probes measure attention in these layers, by number, or in the middle third of this worker's.

        Returns the reason if they can't. After :meth:`chunk_cache_prepare_attention`.
        """
        half = _worker_half()
        names = list(half.kv_caches)
        if unknown := [number for number in layers if not 0 <= number < len(names)]:
            return f"the model has no layer {unknown[0]}, but {len(names)} layers, from 0 on"
        third = len(names) // 3
        measured = layers or range(third, len(names) - third)
        # Another worker may have the layers behind this one's.
        end = max(measured) + 1 if get_pp_group().is_last_rank else len(names)
        computed = dict(zip(names[:end], half.copier.layers, strict=False))
        half.readers.register(Probes(computed, frozenset(names[i] for i in measured)))
        return None

    def chunk_cache_prepare_decoding(self, budget_tokens: int) -> str | None:
        """Lets generated tokens read blocks of so many tokens; returns the reason if they can't."""
        half = _worker_half()
        if reason := self.chunk_cache_decoding_reason():
            return reason
        layers = dict(zip(half.kv_caches, half.copier.layers, strict=True))
        block_tokens = next(iter(layers.values())).key_blocks.shape[1]
        if budget_tokens < (least := LEAST_BLOCKS * block_tokens):
            return f"{budget_tokens} tokens are less than {LEAST_BLOCKS} blocks: give it {least}, or a --block-size"
        num_blocks = budget_tokens // block_tokens
        half.readers.register(DecodingSelection(layers, POLICIES["channels"], num_blocks, self._prompts))
        return None

    def chunk_cache_take_attention(self, probe: int) -> list[Measured]:
        """See :meth:`engine_ext.core.attention.probes.Probes.take`."""
        probes = _worker_half().readers.get(Probes)
        assert probes is not None
        return probes.take(probe)

    def chunk_cache_describe(self) -> dict[str, Any]:
        """Human-readable ``copier`` (which moves K and V) and ``layout`` of the engine's blocks; ``pool_bytes``.

        ``isa`` is vLLM's choice of instructions for attention on a CPU, which decides the layout; ``None`` elsewhere.
        """
        half = _worker_half()
        copier = half.copier
        layers, keys, values = copier.layers, copier.layers[0].key_blocks, copier.layers[0].value_blocks
        layout = (
            f"{len(layers)} layers; in the first {keys.shape[1]} tokens per block, K {keys.shape[2:]} {keys.dtype} on "
            f"{keys.device}; K has {keys.describe()}, V {values.describe()}"
        )
        isa = getattr(self._modules[next(iter(half.kv_caches))], "isa", None)
        return {"copier": copier.name, "layout": layout, "isa": isa, "pool_bytes": half.pool_bytes}

    def chunk_cache_serve_transfers(
        self,
        folder: str,
        fingerprint: str,
        tier_urls: Sequence[str],
        tier_key: bytes | None,
        keeps_prefixes: bool,
    ) -> tuple[str, list[int]] | None:
        """Serve files to :mod:`engine_ext.chunks.transfers`; return the address, and layers' numbers of KV heads.

        ``None`` without ``folder``.

        ``tier_key`` is that of a :class:`cache.tiers.signed.TierKey`.
        """
        if not Path(folder).is_dir():
            return None
        address, half = f"{folder}/{self.rank}", _worker_half()
        with on_all_cores():
            chain = make_chain(half, tier_urls, None if tier_key is None else TierKey(tier_key))
            listen(address, TransferServer(half, chain).answer)
            if keeps_prefixes:
                # Not before: vLLM-Ascend's vLLM lacks names that it imports.
                from engine_ext.core.prefixes.worker import serve_blocks

                engine = (fingerprint, self.rank, self.vllm_config.parallel_config.world_size)
                listen(blocks_address(address), serve_blocks(half, chain, engine))
        return address, sorted({layer.key_pool.shape[2] for layer in half.copier.layers})

    def chunk_cache_forget(self) -> None:
        """Removes the tags of all pages."""
        _worker_half().tags.clear()

    def chunk_cache_refused_tags(self, tags: Sequence[int]) -> list[int]:
        """The tags, of ``tags``, that this worker refused to load."""
        return [tag for tag in tags if tag in _worker_half().refused_tags]

    def chunk_cache_compare(
        self, pages_a: Sequence[int], pages_b: Sequence[int], num_tokens: int, one_token: bool
    ) -> float:
        """See :meth:`engine_ext.core.worker.WorkerHalf.compare`."""
        return _worker_half().compare(pages_a, pages_b, num_tokens, one_token=one_token)


def __getattr__(name: str) -> type:
    """The chunk cache's extension and another of the user's as one class.

    vLLM has one place for both, and finds classes by module and name: here the other's path, with colons for dots.
    """
    module, _, other = name.replace(":", ".").rpartition(".")
    if ":" not in name:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return type("WorkerExtensions", (ChunkCacheWorkerExtension, getattr(import_module(module), other)), {})


def _unsupported_groups(groups: Sequence[Any]) -> str | None:
    """The reason why a layer's KV can't be read from blocks, if any."""
    for spec in itertools.chain.from_iterable(map(specs_of, groups)):
        # Not isinstance: vLLM's subclasses keep other data as well, or drop some.
        is_vllms = type(spec) in (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec)
        if not is_vllms and not ascend.is_latent(spec):
            return f"KV of some layers can't be read from vLLM's blocks ({type(spec).__name__})"
    return None


def _worker_half() -> WorkerHalf:
    half = chunk_connector().worker
    assert half is not None
    return half
