"""Host side of `cuda/product_many.cu`: a layer's products in a decode step of 17 to 32 tokens, sm_90.

Plans are pure functions of the shape, so they are tested without a GPU. docs/kernels/ has the design and the numbers.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_gptoss.kernels import nvrtc
from vllm_gptoss.kernels.dense import BLOCK, SHARED_LIMIT, address, multiprocessors

if TYPE_CHECKING:
    from torch import Tensor

SOURCE = Path(__file__).parent / "cuda" / "product_many.cu"
M = 64
"""Tokens that wgmma multiplies at once, whether there are so many or not."""
MAX_TOKENS = 32
"""Of a step. A cluster of four takes up to 64, and gains nothing there (docs/kernels/log.md)."""
CLUSTER = 2
"""Blocks that share the columns: half of the activations lie in a block's shared memory at once."""
THREADS = 288
"""Of a block: a warpgroup that multiplies, four warps that copy weights, one for activations."""
ROW_GROUP = 8
"""Weight rows: what wgmma's N is a multiple of."""
MOST_ROWS = 192
"""Of a cluster: a thread has half as many registers of sums."""


@dataclass(frozen=True, slots=True)
class ProductPlan:
    """Compile-time macros of one product and its launch.

    rows: weight rows of a cluster; stages: tiles of 64 columns in a block's ring of weights; grid: blocks.
    """

    rows: int
    columns: int
    stages: int
    grid: int

    @property
    def shared_bytes(self) -> int:
        """Activations, the ring, and the barriers. wgmma reads 64 tokens from where a tile begins: of the last, what
        lies behind it."""
        ring = self.stages * (self.rows * 128 + 16)
        return _activations(self.columns) + max(ring, (M - MAX_TOKENS) * 128)

    @property
    def macros(self) -> dict[str, int]:
        return {
            "ROWS": self.rows,
            "COLUMNS": self.columns,
            "TOKENS": MAX_TOKENS,
            "STAGES": self.stages,
            "CLUSTER": CLUSTER,
        }


def _tiles(columns: int) -> int:
    """Of 64 columns, that a block has at most."""
    return -(-columns // BLOCK // CLUSTER)


def _activations(columns: int) -> int:
    """Bytes of a block's tiles of activations, and of their barriers."""
    return _tiles(columns) * (MAX_TOKENS * 128 + 8)


def unsupported(rows: int, columns: int, sms: int) -> str | None:
    """Why a product with weight [rows, columns] has no kernel on a GPU of `sms` multiprocessors, or None."""
    if columns % BLOCK or columns < CLUSTER * BLOCK:
        return f"{columns} columns are not a multiple of {BLOCK} from {CLUSTER * BLOCK} on"
    if rows % ROW_GROUP or not 0 < rows <= sms // CLUSTER * MOST_ROWS:
        return f"{rows} rows are not a multiple of {ROW_GROUP} up to {sms // CLUSTER * MOST_ROWS}"
    if _plan(rows, columns, sms).stages < min(2, columns // BLOCK // CLUSTER):
        return f"the activations of {columns} columns leave no memory for weights"
    return None


@functools.cache
def plan(rows: int, columns: int, sms: int) -> ProductPlan:
    """The launch of a product with weight [rows, columns] on a GPU of `sms` multiprocessors.

    Raises:
        ValueError: a shape without a kernel.
    """
    if reason := unsupported(rows, columns, sms):
        raise ValueError(reason)
    return _plan(rows, columns, sms)


def _plan(rows: int, columns: int, sms: int) -> ProductPlan:
    each = -(-rows // (sms // CLUSTER * ROW_GROUP)) * ROW_GROUP
    left = SHARED_LIMIT - _activations(columns)
    stages = min(_tiles(columns), left // (each * 128 + 16))
    return ProductPlan(each, columns, stages, -(-rows // each) * CLUSTER)


def fits(*weights: Tensor) -> bool:
    """Whether all these weights have a kernel."""
    return all(unsupported(*weight.shape, _sms(weight)) is None for weight in weights)


def loads(*weights: Tensor) -> Iterator[tuple[Callable[..., object], *tuple[Hashable, ...]]]:
    """Calls that load the kernels of these weights' products, if all have one: see `nvrtc.at_once`."""
    if fits(*weights):
        for weight in weights:
            yield kernel, weight.device.index or 0, plan(*weight.shape, _sms(weight))


def _sms(weight: Tensor) -> int:
    return multiprocessors(weight.device.index or 0)


def tiled(x: Tensor, columns: int) -> Tensor:
    """Memory for activations [T, columns] as the kernel reads them, for as many tokens as `x` has.

    [columns / 64, T up to a multiple of 8, 64] bf16, the 16-byte piece p of token t's 64 columns at p ^ (t % 8).
    """
    return x.new_empty((columns // BLOCK, -(-x.shape[0] // 8) * 8, BLOCK))


class Args(ctypes.Structure):
    """`struct Args` of product_many.cu, field for field."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "w", "bias", "y")),
        *((name, ctypes.c_int) for name in ("tokens", "padded", "rows")),
    ]


@functools.cache
def kernel(device: int, plan: ProductPlan) -> nvrtc.Kernel:
    """The kernel of a plan, compiled and loaded.

    Raises:
        NvrtcError: the compiler or the driver refused.
    """
    return nvrtc.load(device, SOURCE, "sm_90a", plan.macros).kernel("product_many", plan.shared_bytes)


def product(x: Tensor, weight: Tensor, bias: Tensor, out: Tensor) -> None:
    """out = x W^T + bias.

    x: as `tiled` says, of T tokens; weight: [N, C] bf16, row-major; bias: [N] bf16; out: [T, N] bf16, row-major.

    Raises:
        ValueError: more than MAX_TOKENS tokens, or a shape without a kernel.
    """
    tokens = out.shape[0]
    if not 1 <= tokens <= MAX_TOKENS:
        raise ValueError(f"1 to {MAX_TOKENS} tokens, got {tokens}")
    device, (rows, columns) = x.device.index or 0, weight.shape
    tuned = plan(rows, columns, _sms(weight))
    args = Args(
        x=address(x),
        w=address(weight),
        bias=address(bias),
        y=address(out),
        tokens=tokens,
        padded=x.shape[1],
        rows=rows,
    )
    kernel(device, tuned)(tuned.grid, THREADS, [args])
