"""The communicator that `many_cpus_platform` names and vLLM imports last."""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator


class Communicator(CpuCommunicator):
    """vLLM's, with the two calls that its experts make between ranks."""

    def all_gatherv(self, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
        """`input_`, [T, …] or several, of every rank in the order of ranks. sizes: each rank's T."""
        if isinstance(input_, list):
            return [self.all_gatherv(each, dim, sizes) for each in input_]
        assert dim == 0
        sizes = sizes or [input_.shape[0]] * self.world_size
        longest = input_.new_zeros((max(sizes), *input_.shape[1:]))
        longest[: input_.shape[0]] = input_
        parts = [torch.empty_like(longest) for _ in sizes]
        torch.distributed.all_gather(parts, longest, group=self.device_group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    def reduce_scatterv(self, input_: Any, dim: int = -1, sizes: list[int] | None = None) -> Any:
        """This rank's part of the sum over ranks. input_: [sum of `sizes`, …]."""
        assert dim == 0
        sizes = sizes or [input_.shape[0] // self.world_size] * self.world_size
        whole = input_.contiguous()
        torch.distributed.all_reduce(whole, group=self.device_group)
        begin = sum(sizes[: self.rank_in_group])
        return whole[begin : begin + sizes[self.rank_in_group]]
