"""What each kernel of experts.cu is compiled as: limits, tuned numbers, shared memory, macros. Plain arithmetic.

`experts.py` compiles and launches by it; `choose` calls `unsupported` before the model is built.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

NARROW_TOKENS, WIDE_TOKENS, MAX_TOKENS = 16, 64, 256
"""Up to how many tokens kernels are compiled for: narrow ones (slots of 8 tokens), wide ones (slots of 16), and these
again with more memory for pairs."""
WIDE_MULTIPROCESSORS = 132
"""Of an H100 and an H200: the wide kernels have run on no GPU with fewer."""
MAX_EXPERTS = 128
SLOT_TOKENS = 8
PARTIAL_TOKENS = 512
"""Tokens of the float32 buffer for partial sums. Beyond `WIDE_TOKENS`, `experts_many.py` stores bf16 in it."""
WIDE_ROWS, SPARSE_ROWS = 24, 22
"""Activation rows that a block of a wide kernel stages at once: any slot's 16, or about three experts' at 64 tokens;
beyond 64 tokens."""
SHARED_LIMIT = 232_448
"""Dynamic shared memory a block may have on sm90, in bytes."""
MAX_SCALE = 192
"""Largest e8m0 code that the kernel's arithmetic holds, a factor of 2^65."""


@dataclass(frozen=True)
class Tuning:
    """Compile-time choices of one kernel; see the head of experts.cu.

    registers: a cap for each thread, so that both kernels' blocks fit on a multiprocessor together.
    """

    warps: int
    share: int
    tiles: int
    depth: int
    chunk: int
    registers: int = 255


def compiled_for(tokens: int) -> int:
    """The most tokens of the kernel that runs `tokens`."""
    return next(most for most in (NARROW_TOKENS, WIDE_TOKENS, MAX_TOKENS) if tokens <= most)


def shared_bytes(
    tuning: Tuning,
    tiles: int,
    rows: int,
    active: int = 4,
    wide_experts: int = 0,
    most: int = WIDE_TOKENS,
    slot: int = 16,
) -> int:
    """Dynamic shared memory of one block, mirroring the layout at the head of experts.cu.

    tiles: C/64; rows: activation rows staged, see `staged_rows`; wide_experts: local experts of a wide kernel, else 0;
    most: tokens that such a kernel is compiled for; slot: tokens of its slots, WIDE_SLOT.
    """
    pairs = active * (most if wide_experts else NARROW_TOKENS)
    entry = 2 + slot * (2 if pairs > 256 else 1)
    slots = (wide_experts + pairs // slot) * entry if wide_experts else pairs * 10
    sorting = 128 if wide_experts else 1
    meta = -(-(-(-(8 * pairs + slots + 28 + 32 * tuning.warps + sorting) // 4) * 4) // 128) * 128
    reduction = tuning.warps * 1024 * tuning.tiles if tuning.share > 1 else 0
    ring = tuning.warps * tuning.depth * tuning.tiles * (512 + 2 * 32)
    return meta + reduction + ring + rows * (tiles * 128 + 16)


def fitted(tuning: Tuning, tiles: int) -> Tuning:
    """`tuning` with a ring no longer than a warp's share of K: a tensor-parallel rank's down projection is short."""
    share = -(-tiles // tuning.share)
    if tuning.depth <= share:
        return tuning
    chunk = min(tuning.chunk, share)
    return replace(tuning, depth=share // chunk * chunk, chunk=chunk)


def staged_rows(which: str, tokens: int) -> tuple[int, int]:
    """(rows staged in shared memory, the kernel's `rows`).

    `rows`: staged rows per slot. 0: each token is staged once and shared by all slots. A wide kernel: all rows.
    """
    if tokens > NARROW_TOKENS:
        rows = WIDE_ROWS if tokens <= WIDE_TOKENS else SPARSE_ROWS
        return rows, rows
    if which == "experts_up" and tokens <= SLOT_TOKENS:
        return tokens, 0
    each = min(tokens, SLOT_TOKENS)
    return 2 * each, each


def defines(
    tuning: Tuning,
    rows: int,
    tiles: int,
    scale_pairs: int,
    experts: int,
    active: int,
    routed: int,
    mode: tuple[int, int],
    mapped: bool,
    tokens: int = NARROW_TOKENS,
) -> dict[str, int | str]:
    """The macros that make experts.cu one kernel."""
    return {
        "TOKENS": tokens,
        "KT": tiles,
        "NROWS": rows,
        "SKT": scale_pairs,
        "EXPERTS": experts,
        "ACTIVE": active,
        "ROUTED": routed,
        "NWARPS": tuning.warps,
        "WPU": tuning.share,
        "R": tuning.tiles,
        "DEPTH": tuning.depth,
        "CHUNK": tuning.chunk,
        "MINBLOCKS": 1,
        "LOGITS": mode[0],
        "ID64": mode[1],
        "MAPPED": int(mapped),
    }


UP = Tuning(warps=16, share=1, tiles=1, depth=9, chunk=3, registers=72)
DOWN = Tuning(warps=16, share=1, tiles=1, depth=9, chunk=3, registers=64)
UP_WIDE, DOWN_WIDE = replace(UP, registers=128), replace(DOWN, registers=128)
DOWN_FEWEST = Tuning(warps=12, share=2, tiles=1, depth=8, chunk=2, registers=80)
"""For up to `FEWEST_TOKENS`: a block has so few units that two warps share one."""
FEWEST_TOKENS = 2


def unsupported(hidden: int, intermediate: int, experts: int, active: int) -> str | None:
    """Why a rank with these experts has no kernel, or None. intermediate, experts: this rank's, padding included."""
    if hidden % 64 or intermediate % 64 or not hidden or not intermediate:
        return f"experts of {hidden} x {intermediate} are not multiples of 64"
    if not 1 <= experts <= MAX_EXPERTS:
        return f"{experts} experts on one rank, not 1 to {MAX_EXPERTS}"
    if not 1 <= active <= 4:
        return f"{active} experts a token, not 1 to 4"
    for tuning, which, columns, tokens in (
        (UP, "experts_up", hidden, NARROW_TOKENS),
        (DOWN, "experts_down", intermediate, NARROW_TOKENS),
        (DOWN_FEWEST, "experts_down", intermediate, FEWEST_TOKENS),
        (UP_WIDE, "experts_up", hidden, WIDE_TOKENS),
        (DOWN_WIDE, "experts_down", intermediate, WIDE_TOKENS),
        (UP_WIDE, "experts_up", hidden, MAX_TOKENS),
        (DOWN_WIDE, "experts_down", intermediate, MAX_TOKENS),
    ):
        wide = experts if tokens > NARROW_TOKENS else 0
        rows, _ = staged_rows(which, tokens)
        needs = shared_bytes(fitted(tuning, columns // 64), columns // 64, rows, active, wide, tokens)
        if needs > SHARED_LIMIT:
            return f"{which} of {columns} columns needs {needs} bytes of shared memory, there are {SHARED_LIMIT}"
    return None
