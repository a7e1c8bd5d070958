"""Attention of decode steps of many tokens alone, keys cold in L2: time, share of the floor, FlashAttention 3's time.

    python benchmarks/attention.py [--tokens 17,32,64,128,256,512] [--keys 576,8192,ragged,long] [--out FILE]

Times are of CUDA graph replays, each graph a chain of launches on different blocks of one cache of more than L2 holds.
`ragged`: requests of 16 to 2,047 keys; `long`: one request of 30,000 keys among others of 200. The floor is the keys
and values that must be read over 4.3 TB/s. FA3 is called as vLLM's backend calls it in a captured decode step, planned
once for the whole chain.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from timing import BYTES_PER_SECOND, microseconds, on_hopper, write
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from vllm_gptoss.engine import spec
from vllm_gptoss.engine.kernels import attention_many

HEADS, KV_HEADS, HEAD, BLOCK = 64, 8, 64, 16
BLOCKS = 270_000
"""Of the cache: 4.3 million tokens, 8.8 GB. Tokens of a block follow one another, as vLLM lays them by default."""
L2_TIMES = 300e6
"""Bytes that pass before a launch reads the same keys again."""
LONGEST, SPLITS = 131_072, 32
"""The values of a captured graph for FA3: the longest sequence, the most splits."""
DEVICE = "cuda"


class Step:
    """A decode step: lengths, and block tables of as many layers as exceed L2."""

    def __init__(self, cache: Tensor, order: Tensor, tokens: int, keys: str, window: int) -> None:
        self.cache, self.window, self.tokens = cache, window, tokens
        self.lens = lengths(tokens, keys).to(DEVICE, torch.int32)
        self.starts = torch.arange(tokens + 1, device=DEVICE, dtype=torch.int32)
        self.q = torch.randn(tokens, HEADS * HEAD, device=DEVICE).bfloat16()
        self.sinks = torch.randn(HEADS, device=DEVICE).bfloat16()
        self.out = torch.empty_like(self.q)
        seen = self.lens.clamp_max(window) if window else self.lens
        self.bytes = int(seen.sum()) * KV_HEADS * 2 * HEAD * 2
        tables = [self.table(order, i) for i in range(max(1, min(24, math.ceil(L2_TIMES / self.bytes))))]
        self.chain = [tables[i % len(tables)] for i in range(max(4, len(tables)))]

    def table(self, order: Tensor, index: int) -> Tensor:
        """Blocks of no order."""
        blocks = (self.lens + BLOCK - 1) // BLOCK
        total, width = int(blocks.sum()), int(blocks.max())
        at = index * total % max(1, BLOCKS - total)
        table = torch.zeros(self.tokens, width, device=DEVICE, dtype=torch.int32)
        table[torch.arange(width, device=DEVICE)[None] < blocks[:, None]] = order[at : at + total]
        return table

    def ours(self) -> None:
        for table in self.chain:
            attention_many.attend(
                self.q, self.cache, self.sinks, table, self.lens, self.starts, self.out, HEAD**-0.5, self.window
            )

    def flash(self) -> Callable[[], None]:
        """FA3, planned. ImportError without vLLM."""
        from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata

        window = [self.window - 1, 0] if self.window else [-1, -1]
        plan = get_scheduler_metadata(
            batch_size=self.tokens, max_seqlen_q=1, max_seqlen_k=LONGEST, num_heads_q=HEADS, num_heads_kv=KV_HEADS,
            headdim=HEAD, cache_seqlens=self.lens, qkv_dtype=torch.bfloat16, cu_seqlens_q=self.starts, page_size=BLOCK,
            causal=True, window_size=tuple(window), num_splits=SPLITS,
        )  # fmt: skip
        key, value = self.cache.transpose(1, 2).split(HEAD, dim=-1)
        q, out = self.q.unflatten(-1, (-1, HEAD)), self.out.unflatten(-1, (-1, HEAD))

        def run() -> None:
            for table in self.chain:
                flash_attn_varlen_func(
                    q=q, k=key, v=value, out=out, cu_seqlens_q=self.starts, max_seqlen_q=1, seqused_k=self.lens,
                    max_seqlen_k=LONGEST, softmax_scale=HEAD**-0.5, causal=True, window_size=window, block_table=table,
                    scheduler_metadata=plan, fa_version=3, num_splits=SPLITS, s_aux=self.sinks,
                )  # fmt: skip

        return run


def lengths(tokens: int, keys: str) -> Tensor:
    """Keys of each request."""
    if keys == "ragged":
        return torch.randint(16, 2048, (tokens,), generator=torch.Generator().manual_seed(5))
    lens = torch.full((tokens,), 200 if keys == "long" else int(keys))
    if keys == "long":
        lens[tokens // 2] = 30_000
    return lens


def measure(step: Step, keys: str) -> dict[str, Any]:
    repeats = 8 if step.bytes > 1e9 else 20
    row: dict[str, Any] = {"tokens": step.tokens, "keys": keys, "window": step.window}
    row["us"] = microseconds(step.ours, len(step.chain), repeats)
    row["floor_us"] = step.bytes / BYTES_PER_SECOND * 1e6
    row["share_of_floor"] = row["floor_us"] / row["us"]
    try:
        row["fa3_us"] = microseconds(step.flash(), len(step.chain), repeats)
    except ImportError:
        row["fa3_us"] = None
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="17,24,32,48,64,128,256,512")
    parser.add_argument("--keys", default="576,1536,8192,ragged,long")
    parser.add_argument("--out", default="")
    options = parser.parse_args()
    cache = torch.empty(BLOCKS, BLOCK, KV_HEADS, 2 * HEAD, device=DEVICE, dtype=torch.bfloat16)
    for part in cache.split(20_000):
        part.normal_()
    order = torch.randperm(BLOCKS, device=DEVICE).int()
    rows = []
    for keys in options.keys.split(","):
        for window in (spec.WINDOW, 0):
            for tokens in map(int, options.tokens.split(",")):
                if window and keys != options.keys.split(",")[0]:
                    continue  # a window has the same number of keys for every length
                row = measure(Step(cache.transpose(1, 2), order, tokens, keys, window), keys)
                rows.append(row)
                print(
                    " ".join(f"{k}={v:.1f}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()), flush=True
                )
    if options.out:
        write(options.out, rows)


if __name__ == "__main__":
    on_hopper(main)
