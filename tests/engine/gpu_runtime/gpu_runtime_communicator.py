# SPDX-License-Identifier: Apache-2.0
"""Collectives that experts of data-parallel ranks need, which vLLM has for GPUs only, by Gloo."""

import torch
from torch import Tensor
from torch.distributed import all_gather, all_reduce
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator


class GpuRuntimeCommunicator(CpuCommunicator):
    """vLLM's communicator for CPUs, with tensors of another length on each rank."""

    def all_gatherv(
        self, input_: Tensor | list[Tensor], dim: int = 0, sizes: list[int] | None = None
    ) -> Tensor | list[Tensor]:
        """All ranks' tensors, concatenated; ``sizes`` are their lengths."""
        if isinstance(input_, list):
            return [self.all_gatherv(each, dim, sizes) for each in input_]
        assert dim == 0
        sizes = sizes or [len(input_)] * self.world_size
        padded = input_.new_zeros(max(sizes), *input_.shape[1:])
        padded[: len(input_)] = input_
        found = [torch.empty_like(padded) for _ in sizes]
        all_gather(found, padded, group=self.device_group)
        return torch.cat([each[:size] for each, size in zip(found, sizes, strict=True)])

    def reduce_scatterv(self, input_: Tensor, dim: int = -1, sizes: list[int] | None = None) -> Tensor:
        """This rank's part of the sum of all ranks' tensors."""
        assert dim == 0
        sizes = sizes or [len(input_) // self.world_size] * self.world_size
        total = input_.clone()
        all_reduce(total, group=self.device_group)
        return total.split(sizes)[self.rank_in_group]
