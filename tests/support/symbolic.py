# SPDX-License-Identifier: Apache-2.0
"""An engine whose KV is labels instead of numbers: vLLM's own asynchronous scheduler, its connector's two halves, and a
model that labels each token by all that it attends to.

A token's KV is ``(content, position)``: ``content`` is a digest of the token, its position and the KV of every token
before it, so that no two contexts give the same; a rotation adds to ``position``. What a request has read, wherever it
came from, so shows in its next token.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from typing import Any, Final

import numpy as np
import pytest
import torch
from torch import Tensor
from vllm.config import KVTransferConfig, VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker import kv_connector_model_runner_mixin as mixin

from app.models.demo_model import DEMO_MODEL
from engine_ext.core import worker as worker_module
from engine_ext.core.connector import ChunkCacheConnector, KVConnectorRole
from engine_ext.wire.plan import TransferPlan
from kernels.layout import PagedTensor
from kernels.paged import KVCopier, LayerKV
from kernels.reference import frequencies

BLOCK_TOKENS: Final = 4
PAGE_TOKENS: Final = 4
NUM_PAGES: Final = 14
_NUM_BLOCKS: Final = 15
_LIMIT: Final = 56
_IN_FLIGHT: Final = 2
"""Steps that vLLM schedules before it reads the output of the first."""

Labels = np.ndarray[Any, np.dtype[np.int64]]
"""``[n, 2]``: content and position of each token."""


def continued(context: Labels, token_ids: Sequence[int]) -> Labels:
    """The context's labels and those of tokens computed behind it."""
    before = blake2b(np.ascontiguousarray(context), digest_size=8)
    labels = []
    for position, token in enumerate(token_ids, len(context)):
        behind = before.copy()
        behind.update(b"%d at %d" % (token, position))
        labels.append((int.from_bytes(behind.digest(), "little") >> 2, position))
        before.update(np.array(labels[-1], np.int64))
    return np.concatenate([context, np.array(labels, np.int64).reshape(-1, 2)])


@cache
def computed(token_ids: tuple[int, ...]) -> Labels:
    """Labels of tokens in full attention."""
    return continued(np.zeros((0, 2), np.int64), token_ids)


def next_token(labels: Labels) -> int:
    """The token that the model generates behind these."""
    return 1000 + int(labels[-1, 0]) % 997


class SymbolicCopier(KVCopier):
    """Copies labels; of one layer, whose K has the positions and V the contents."""

    def _save(self, slots: Tensor, rows: Tensor) -> None:
        for blocks, pool in self._pairs():
            pool[rows] = blocks[slots]

    def _load(self, slots: Tensor, rows: Tensor, deltas: Tensor) -> None:
        for blocks, pool in self._pairs():
            blocks[slots] = pool[rows]
        keys, _ = self._pairs()[0]
        keys[slots] += deltas[:, None, None]

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        (layer,) = self.layers
        pairs = ((layer.key_blocks, layer.key_pool), (layer.value_blocks, layer.value_pool))
        return [(blocks.tiles.view(-1, 1, 1), pool.view(-1, 1, 1)) for blocks, pool in pairs]


@dataclass
class _Row:
    """A request as the model runner knows it."""

    token_ids: list[int]
    block_ids: list[int]


class SymbolicEngine:
    """vLLM's engine core, at most two steps ahead of its outputs.

    ``preempts_in_flight``: as older vLLM, it may preempt a request whose last step it hasn't read.
    """

    def __init__(self, *, preempts_in_flight: bool) -> None:
        config = _config()
        init_none_hash(self._hash)
        spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=1, dtype=torch.float32)
        groups = [KVCacheGroupSpec(["layer"], spec)]
        blocks = KVCacheConfig(num_blocks=_NUM_BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups)
        self.scheduler = AsyncScheduler(config, blocks, StructuredOutputManager(config), BLOCK_TOKENS)
        self.scheduler.defer_block_free = not preempts_in_flight
        self._connector = ChunkCacheConnector(config, KVConnectorRole.WORKER, blocks)
        assert self._connector.worker is not None
        self.worker = self._connector.worker
        self._keys, self._values = (torch.full((_NUM_BLOCKS, BLOCK_TOKENS, 1, 1), -1) for _ in "kv")
        pools = [torch.full((NUM_PAGES, PAGE_TOKENS, 1, 1), -1) for _ in "kv"]
        views = [PagedTensor.of(each) for each in (self._keys, self._values)]
        self.worker.attach([LayerKV(*views, *pools, frequencies(2))])
        self._pools = pools
        self._rows: dict[str, _Row] = {}
        self._in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()

    @property
    def _hash(self) -> Any:
        return get_hash_fn_by_name("sha256")

    def add(
        self, name: str, token_ids: Sequence[int], plan: TransferPlan | None, salt: str | None, max_tokens: int
    ) -> None:
        """Adds a request."""
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        if plan is not None:
            params.extra_args = {"kv_transfer_params": plan.to_params()}
        hasher = get_request_block_hasher(BLOCK_TOKENS, self._hash)
        request = Request(name, list(token_ids), params, None, cache_salt=salt, block_hasher=hasher)
        self.scheduler.add_request(request)

    def abort(self, name: str) -> None:
        """Ends a request, whose steps in flight go on."""
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def schedule(self) -> None:
        """Schedules and runs a step, unless two are in flight."""
        if len(self._in_flight) < _IN_FLIGHT and self.scheduler.has_requests():
            step = self.scheduler.schedule()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(mixin, "get_kv_transfer_group", lambda: self._connector)
                patch.setattr(mixin, "get_forward_context", lambda: None)
                self._in_flight.append((step, self._run(step)))

    def receive(self) -> Iterator[tuple[str, list[int], str | None, dict[str, Any]]]:
        """Reads the first output in flight: new tokens by request, why it ended if it did, and what it says of KV."""
        if self._in_flight:
            for of_client in self.scheduler.update_from_output(*self._in_flight.popleft()).values():
                for each in of_client.outputs:
                    ended = None if each.finish_reason is None else str(each.finish_reason)
                    yield each.request_id, each.new_token_ids, ended, each.kv_transfer_params or {}

    def pooled(self, pages: Sequence[int], num_tokens: int) -> Labels:
        """Labels on pages of the pool."""
        keys, values = (pool[list(pages)].flatten()[:num_tokens].numpy() for pool in self._pools)
        return np.stack([values, keys], axis=1)

    def tensors(self, labels: Labels) -> dict[str, Tensor]:
        """Labels as a file has them."""
        names = self.worker.forms(len(labels))
        return {name: torch.tensor(labels[:, at].reshape(-1, 1, 1)) for name, at in zip(names, (1, 0), strict=True)}

    def _run(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """A step of the model runner. vLLM's own code calls the connector."""
        if not step.total_num_scheduled_tokens:
            with mixin.KVConnectorModelRunnerMixin._get_kv_connector_output(step) as of_connector:
                pass
            return ModelRunnerOutput.with_kv_conn_output_only(of_connector)
        computed_before = self._follow(step)
        sampled = []
        with mixin.KVConnectorModelRunnerMixin._get_kv_connector_output(step) as of_connector:
            for name, num_tokens in step.num_scheduled_tokens.items():
                sampled.append(self._forward(self._rows[name], computed_before[name], num_tokens))
        names = list(step.num_scheduled_tokens)
        indices = {name: i for i, name in enumerate(names)}
        return ModelRunnerOutput(names, indices, sampled, kv_connector_output=of_connector)

    def _follow(self, step: SchedulerOutput) -> dict[str, int]:
        """Updates the rows; returns how many tokens of each are computed."""
        for name in step.finished_req_ids:
            self._rows.pop(name, None)
        num_computed = {}
        for new in step.scheduled_new_reqs:
            self._rows[new.req_id] = _Row(list(new.prompt_token_ids or ()), list(new.block_ids[0]))
            num_computed[new.req_id] = new.num_computed_tokens
        cached = step.scheduled_cached_reqs
        for name, new_ids, num in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True):
            row = self._rows[name]
            if name in cached.all_token_ids:
                row.token_ids = cached.all_token_ids[name]
            kept = [] if name in cached.resumed_req_ids else row.block_ids
            row.block_ids = [*kept, *(new_ids[0] if new_ids else ())]
            num_computed[name] = num
        return num_computed

    def _forward(self, row: _Row, start: int, num_tokens: int) -> list[int]:
        """Computes tokens behind what the row's blocks have; returns the next token behind a whole prompt."""
        end = start + num_tokens
        places = [(row.block_ids[i // BLOCK_TOKENS], i % BLOCK_TOKENS) for i in range(end)]
        blocks, offsets = torch.tensor(places).T
        before = blocks[:start], offsets[:start]
        context = torch.stack([self._values[before], self._keys[before]]).reshape(2, start).T.numpy()
        labels = continued(context, row.token_ids[start:end])
        new = torch.from_numpy(labels[start:])
        for tensor, column in ((self._values, 0), (self._keys, 1)):
            tensor[blocks[start:], offsets[start:]] = new[:, column].reshape(-1, 1, 1)
        if end < len(row.token_ids):
            return []
        row.token_ids.append(next_token(labels))
        return row.token_ids[-1:]


@contextmanager
def symbolic_copies() -> Iterator[None]:
    """Workers copy labels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker_module, "copier_for", lambda layers, _: SymbolicCopier(layers))
        yield


@cache
def _config() -> VllmConfig:
    connector = KVTransferConfig(
        kv_connector=ChunkCacheConnector.__name__,
        kv_connector_module_path=ChunkCacheConnector.__module__,
        kv_role="kv_both",
        kv_load_failure_policy="fail",
        kv_connector_extra_config={"pool_bytes": 0, "page_tokens": PAGE_TOKENS},
    )
    config = AsyncEngineArgs(
        model=str(DEMO_MODEL),
        dtype="float32",
        max_model_len=_LIMIT,
        max_num_batched_tokens=16,
        max_num_seqs=4,
        block_size=BLOCK_TOKENS,
        enable_prefix_caching=True,
        async_scheduling=True,
        kv_transfer_config=connector,
    ).create_engine_config()
    config.cache_config.num_gpu_blocks = _NUM_BLOCKS
    config.scheduler_config.async_scheduling = True  # as on GPUs
    return config
