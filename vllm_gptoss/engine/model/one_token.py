"""A step of one token in one launch: every layer of the model in `engine/kernels/step.py`.

`FusedPath` uses it where it can. The kernel's blocks wait for one another and for those of the other ranks, so all of
them must be on the GPUs at once: nothing that waits for a rank may hold a multiprocessor meanwhile. A rank's kernels
run in turn, and every rank launches the same ones, so each rank's step begins once its peers' earlier kernels end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from vllm_gptoss import _vllm
from vllm_gptoss.engine import choose
from vllm_gptoss.engine.choose import bands, device
from vllm_gptoss.engine.kernels import all_reduce, cache, nvrtc, step
from vllm_gptoss.engine.kernels.layer import Requests
from vllm_gptoss.engine.model.layer_binding import Place, transferred
from vllm_gptoss.engine.spec import RMS_NORM_EPS


def build(places: Sequence[Place], deployment: choose.Deployment, wish: str = "auto") -> OneToken | None:
    """The compiled path; several ranks `join` before its first step. If it cannot run, returns None and logs the
    reason. wish: that of the layers."""
    choice = choose.one_token(device.detect(), deployment, wish)
    if choice.value == bands.ONE_LAUNCH:
        path = OneToken(places, deployment.tensor_parallel)
        try:
            path.step.compile()
            return path
        except nvrtc.NvrtcError as error:
            choice = choose.Choice(bands.SIX_LAUNCHES, f"the kernel cannot be compiled: {error}")
    _vllm.init_logger("vllm.gptoss").info("layers: six launches each for one token too (%s)", choice.reason)
    return None


class OneToken:
    """The model's layers, ready for steps of one token."""

    def __init__(self, places: Sequence[Place], ranks: int = 1) -> None:
        self.places, self.said = places, False
        element = cache.element(places[0].cache)
        self.step = step.Step([place.tensors for place in places], eps=RMS_NORM_EPS, element=element, ranks=ranks)

    def join(self, push: all_reduce.PushAllReduce) -> None:
        """The ranks store into each other's memory that `push` has mapped."""
        self.step.rank, self.step.received = push.rank, push.others

    def __call__(
        self, x: Tensor, residual: Tensor | None, positions: Tensor, context: Any
    ) -> tuple[Tensor, Tensor] | None:
        """(the last layer's experts, what they are to be added to), both [1, C] bf16, for the context's attention
        metadata. None, and one line, where the layers have too many kinds of it, or unseen caches while a graph is
        captured; vLLM runs every step once before it captures it."""
        kinds: dict[tuple[int, int], int] = {}
        requests: list[Requests] = []
        groups: list[int] = []
        for place in self.places:
            found = place.requests(context)
            kind = (found.block_table.data_ptr(), found.slots.data_ptr())
            if kind not in kinds:
                kinds[kind] = len(requests)
                requests.append(found)
            groups.append(kinds[kind])
        # Looked up each time: vLLM profiles its graphs with a small cache before it makes the real one.
        caches = [place.cache for place in self.places]
        table = self.step.table(groups, caches) if len(requests) <= step.MAX_GROUPS else None
        if table is not None:
            with transferred(self.places, context):
                result: tuple[Tensor, Tensor] = self.step(x, residual, positions, requests, table)
            return result
        if not self.said:
            self.said = True
            _vllm.init_logger("vllm.gptoss").info(
                "layers: six launches each for one token (%d kinds of caches, or caches first seen in a graph)",
                len(requests),
            )
        return None
