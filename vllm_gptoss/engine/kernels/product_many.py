"""Host side of `cuda/product_many.cu`: a layer's products in a decode step of 17 to 32 tokens, sm_90.

Plans are pure functions of the shape, so they are tested without a GPU. docs/kernels/ has the design and the numbers.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_gptoss.engine.kernels import cache, nvrtc
from vllm_gptoss.engine.kernels.dense import (
    BLOCK,
    HEAD,
    ROPE_FIELDS,
    SHARED_LIMIT,
    UNIT,
    address,
    multiprocessors,
    rope_described,
)

if TYPE_CHECKING:
    from torch import Tensor

SOURCE = Path(__file__).parent / "cuda" / "product_many.cu"
M = 64
"""Tokens that wgmma multiplies at once, whether there are so many or not."""
MAX_TOKENS = 32
"""Of a step. A cluster of four takes up to 64, and gains nothing there (docs/kernels/experiments.md)."""
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

    rows: weight rows of a cluster; stages: tiles of 64 columns in a block's ring of weights; grid: blocks; rope: of
    `rotated`; element: of the cache that it writes.
    """

    rows: int
    columns: int
    stages: int
    grid: int
    rope: bool = False
    element: str = cache.BF16

    @property
    def shared_bytes(self) -> int:
        """Activations, the ring, and the barriers. wgmma reads 64 tokens from where a tile begins: of the last, what
        lies behind it."""
        ring = self.stages * (self.rows * 128 + 16)
        return _activations(self.columns) + max(ring, (M - MAX_TOKENS) * 128)

    @property
    def macros(self) -> dict[str, int | str]:
        values: dict[str, int | str] = {
            "ROWS": self.rows,
            "COLUMNS": self.columns,
            "TOKENS": MAX_TOKENS,
            "STAGES": self.stages,
            "CLUSTER": CLUSTER,
            "ROPE": int(self.rope),
        }
        return values | {"CACHE": self.element} if self.rope else values


def _tiles(columns: int) -> int:
    """Of 64 columns, that a block has at most."""
    return -(-columns // BLOCK // CLUSTER)


def _activations(columns: int) -> int:
    """Bytes of a block's tiles of activations, and of their barriers."""
    return _tiles(columns) * (MAX_TOKENS * 128 + 8)


def unsupported(rows: int, columns: int, sms: int, rope: bool = False) -> str | None:
    """Why a product with weight [rows, columns] has no kernel on a GPU of `sms` multiprocessors, or None."""
    multiple = HEAD if rope else ROW_GROUP
    if columns % BLOCK or columns < CLUSTER * BLOCK:
        return f"{columns} columns are not a multiple of {BLOCK} from {CLUSTER * BLOCK} on"
    if rows % multiple or not 0 < rows <= sms // CLUSTER * MOST_ROWS:
        return f"{rows} rows are not a multiple of {multiple} up to {sms // CLUSTER * MOST_ROWS}"
    made = _plan(rows, columns, sms, rope)
    if made.rows > 32 * _tiles(columns):  # float32 sums of a token, where 64 bf16 of it were
        return f"the sums of {made.rows} rows do not fit where {columns} columns of activations were"
    if made.stages < min(2, columns // BLOCK // CLUSTER):
        return f"the activations of {columns} columns leave no memory for weights"
    return None


@functools.cache
def plan(rows: int, columns: int, sms: int, rope: bool = False, element: str = cache.BF16) -> ProductPlan:
    """The launch of a product with weight [rows, columns] on a GPU of `sms` multiprocessors; rope: of `rotated`.

    Raises:
        ValueError: a shape without a kernel.
    """
    if reason := unsupported(rows, columns, sms, rope):
        raise ValueError(reason)
    return replace(_plan(rows, columns, sms, rope), element=element if rope else cache.BF16)


def _plan(rows: int, columns: int, sms: int, rope: bool) -> ProductPlan:
    # what a block finishes is whole units of rows that RoPE turns together
    group = CLUSTER * UNIT if rope else ROW_GROUP
    each = -(-rows // (sms // CLUSTER * group)) * group
    left = SHARED_LIMIT - _activations(columns)
    stages = min(_tiles(columns), left // (each * 128 + 16))
    return ProductPlan(each, columns, stages, -(-rows // each) * CLUSTER, rope)


def fits(qkv: Tensor, out: Tensor) -> bool:
    """Whether a layer's weights have kernels: `rotated` for the first, `product` for the second."""
    return all(unsupported(*shape) is None for shape in _shapes(qkv, out))


def loads(
    qkv: Tensor, out: Tensor, element: str = cache.BF16
) -> Iterator[tuple[Callable[..., object], *tuple[Hashable, ...]]]:
    """Calls that load the kernels of a layer's products, if both have one (`nvrtc.at_once`). element: of its cache."""
    if fits(qkv, out):
        for shape in _shapes(qkv, out):
            yield kernel, qkv.device.index or 0, plan(*shape, element)


def _shapes(qkv: Tensor, out: Tensor) -> Iterator[tuple[int, int, int, bool]]:
    """What `plan` takes."""
    for weight, rope in ((qkv, True), (out, False)):
        rows, columns = weight.shape
        yield rows, columns, multiprocessors(weight.device.index or 0), rope


def tiled(x: Tensor, columns: int) -> Tensor:
    """Memory for activations [T, columns] as the kernel reads them, for as many tokens as `x` has.

    [columns / 64, T up to a multiple of 8, 64] bf16, the 16-byte piece p of token t's 64 columns at p ^ (t % 8).
    """
    return x.new_empty((columns // BLOCK, -(-x.shape[0] // 8) * 8, BLOCK))


class ProductArgs(ctypes.Structure):
    """`struct Args` of product_many.cu, field for field."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "w", "bias", "y")),
        *((name, ctypes.c_int) for name in ("tokens", "padded", "rows")),
        *ROPE_FIELDS,
        *cache.SCALE_FIELDS,
    ]


@functools.cache
def kernel(device: int, plan: ProductPlan) -> nvrtc.Kernel:
    """The kernel of a plan, compiled and loaded.

    Raises:
        NvrtcError: the compiler or the driver refused.
    """
    return nvrtc.load(device, SOURCE, "sm_90a", plan.macros).kernel("product_many", plan.shared_bytes)


def product(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """out = x W^T + bias.

    x: in the layout of `tiled`, T tokens; weight: [N, C] bf16, row-major; bias: [N] bf16 or None; out: [T, N] bf16,
    row-major.

    Raises:
        ValueError: more than MAX_TOKENS tokens, or a shape without a kernel.
    """
    _launch(x, weight, bias, out)


def rotated(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    out: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    slots: Tensor,
    kv_cache: cache.PagedCache,
) -> None:
    """A layer's q/k/v: out = RoPE(x W^T + b) of the queries; keys, rotated, and values go into the paged cache.

    Bitwise equal to `product` followed by `norm_rope_router.rope`; of `out`, keys and values are left as they are.

    x: in the layout of `tiled`, T tokens; weight: [(H + 2K) * 64, C] bf16, row-major, queries, keys, values; bias:
    [(H + 2K) * 64] bf16; out: [T, (H + 2K) * 64] bf16, row-major; positions, slots: [T] int64, slot < 0 is not written;
    both must be there before the kernel before this one starts; cos_sin: [positions, 64] f32 or bf16, 32 cosines, 32
    sines; kv_cache: [blocks, K, block size, 128], K at 0, V at 64, of strides that are multiples of 4 but 1 in
    the last.

    Raises:
        ValueError: more than MAX_TOKENS tokens, or a shape without a kernel.
    """
    rope = rope_described(weight.shape[0], positions, cos_sin, slots, kv_cache)
    _launch(x, weight, bias, out, rope, cache.element(kv_cache))


def _launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    rope: dict[str, int | None] | None = None,
    element: str = cache.BF16,
) -> None:
    tokens = out.shape[0]
    if not 1 <= tokens <= MAX_TOKENS:
        raise ValueError(f"1 to {MAX_TOKENS} tokens, got {tokens}")
    device, (rows, columns) = x.device.index or 0, weight.shape
    tuned = plan(rows, columns, multiprocessors(device), rope is not None, element)
    args = ProductArgs(
        x=address(x),
        w=address(weight),
        bias=address(bias),
        y=address(out),
        tokens=tokens,
        padded=x.shape[1],
        rows=rows,
        **rope or {},
    )
    kernel(device, tuned)(tuned.grid, THREADS, [args])
