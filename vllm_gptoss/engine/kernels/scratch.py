"""GPU memory that kernels keep between launches and that holds a value when the next launch starts.

vLLM may discard the contents of its memory and restore only parameters and buffers (sleep level 2). The model registers
the tensors of `kept` as buffers for that reason.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

_tensors: dict[str, Tensor] = {}


def keep(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Decorator: calls `allocate` once for each set of arguments, all of them integers, and registers the tensor."""

    @functools.cache
    def allocated(*sizes: int) -> Tensor:
        with _no_inference_mode():  # vLLM restores buffers outside of it, which inference tensors refuse
            tensor = allocate(*sizes)
        _tensors["_".join(("gptoss", allocate.__name__, *map(str, sizes)))] = tensor
        return tensor

    return functools.wraps(allocate)(allocated)


def _no_inference_mode() -> AbstractContextManager[None]:
    import torch

    return torch.inference_mode(False)  # type: ignore[no-any-return]


def kept() -> dict[str, Tensor]:
    """The registered tensors of this process, by a name that is valid for a module's buffer."""
    return dict(_tensors)
