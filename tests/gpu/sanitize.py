"""Every CUDA kernel under compute-sanitizer, memcheck and racecheck: `python -m tests.gpu.sanitize`.

Each tool runs this file again with `--run`, which launches every kernel of every rank's shape through the GPU tests'
own cases. Needs an sm90 GPU and `compute-sanitizer` of a CUDA toolkit. Exit status 0: both tools found nothing.

One lane of a warp arrives at the producer's barrier after `__syncwarp`. racecheck attributes this arrival to the one
lane and reports every refill of the ring as a race. So the kernels are compiled for it such that every lane arrives
(`SPEAKERS`, barriers.cuh), which is equivalent.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from typing import Any

FOUND = 9
"""Exit status of the sanitizer when it found something."""


def layers(parallel: list[int], experts: list[int]) -> None:
    """Projections, attention and router: batches at both sides of every threshold."""
    import torch

    from tests.gpu import cases
    from vllm_gptoss.engine.kernels import attention, dense

    for size in parallel:
        for tokens in (1, 8, 9, 16):
            cases.qkv_rope(dense.qkv_rope, size, tokens, torch.float32)
            cases.out_proj(dense.out_proj, size, tokens)
        for lengths, queries in (*cases.BATCHES, ([9_000, 100], [1, 2])):
            for window in (0, 128):
                cases.attention(attention.attend, 8 // size, window, lengths, queries, strided=False)
        print(f"TP {size}: projections and attention", flush=True)
    for count in experts:
        for tokens in (1, 8, 9, 16):
            cases.router(dense.router, count, tokens)


def attention(parallel: list[int], counts: list[int]) -> None:
    """Decode attention of many tokens: whole, split, padded; `counts` does not apply."""
    from tests.gpu import cases
    from vllm_gptoss.engine.kernels import attention_many

    for size in parallel:
        for lengths in ([1, 127, 128, 129, 576] * 4, [9000, 2500] + [100] * 20):
            for window in (0, 128):
                for block, each in ((16, 1), (64, 4)):
                    queries, longer = [each] * len(lengths), [length + each for length in lengths]
                    cases.attention(
                        attention_many.attend, 8 // size, window, longer, queries, strided=True, block=block
                    )
        print(f"TP {size}: attention of many tokens", flush=True)


def around_products(parallel: list[int], counts: list[int]) -> None:
    """Products, norm, RoPE and router of decode steps of many tokens: tiles that are full, and one that is not."""
    import torch

    from tests.gpu import cases
    from vllm_gptoss.engine.kernels import norm_rope_router, product_many

    for tokens in (17, 32):
        for rows, columns in ((5120, cases.C), (cases.C, 4096)):
            cases.product(product_many.product, rows, columns, tokens)
        for size in parallel:
            apart = (product_many.product, norm_rope_router.rope)
            cases.rotated(product_many.rotated, apart, size, tokens, torch.float32, strided=True)
    for tokens in (17, 64, 100):
        cases.norm(norm_rope_router.norm, tokens, cases.C)
        for size in parallel:
            cases.rope(norm_rope_router.rope, size, tokens, torch.float32)
        for count in counts:
            cases.router(norm_rope_router.router, count, tokens)
    print("around the products", flush=True)


def experts(parallel: list[int], counts: list[int]) -> None:
    """Both expert projections of every rank, routed by logits and by ids.

    One launch each, of which those of many tokens take 10 to 26 s under racecheck. Without the oracle: its memory is
    not given back under the sanitizer, and an H100's was not enough.
    """
    import torch

    from tests.gpu import cases
    from vllm_gptoss.engine.kernels.experts import FewTokenExperts
    from vllm_gptoss.engine.kernels.experts_many import ManyTokenExperts
    from vllm_gptoss.engine.kernels.experts_plan import NARROW_TOKENS, WIDE_TOKENS
    from vllm_gptoss.engine.kernels.experts_prefill import PrefillExperts

    for count in counts:
        for size in parallel:
            up, down = cases.layer(count, cases.INTERMEDIATE[cases.PARALLEL.index(size)])
            few = FewTokenExperts(
                up.projection, down.projection, cases.ACTIVE, count, alpha=cases.ALPHA, limit=cases.LIMIT
            )

            def launch(module: Any, tokens: int, routed: str, count: int = count) -> None:
                logits = cases.routing_logits(tokens, count, cases.ACTIVE, routed)
                cases.run_experts(module, cases.draw(tokens, cases.C), logits, None)

            for tokens in sorted({1, 2, 3, 8, 9, NARROW_TOKENS, *(min(n, few.max_tokens) for n in (WIDE_TOKENS, 96))}):
                launch(few, tokens, "uniform")
            ids = torch.arange(cases.ACTIVE, device="cuda", dtype=torch.int32).repeat(3, 1)
            cases.run_experts(few, cases.draw(3, cases.C), ids, torch.rand(3, cases.ACTIVE, device="cuda"))
            for tokens, routed in ((40, "uniform"), (200, "half"), (512, "uniform"), (600, "uniform")):
                launch(ManyTokenExperts(few), tokens, routed)
            for tokens, routed in ((1, "uniform"), (600, "uniform"), (900, "half")):
                launch(PrefillExperts(few), tokens, routed)
            print(f"TP {size}: {count} experts", flush=True)
            del up, down, few
            torch.cuda.empty_cache()


def step(parallel: list[int], counts: list[int]) -> None:
    """Layers of one token in one launch, one and three of them; `parallel` does not apply, it is for one GPU."""
    import torch

    from tests.gpu import cases

    for count in counts:
        for keys, window in ((1, 0), (200, 128), (700, 0), (3000, 0)):
            cases.step(cases.run_step, *cases.layer(count, cases.C), keys, window=window)
        up, down = cases.layer(count, cases.C)
        cos_sin, positions = torch.randn(200, cases.HEAD, device="cuda"), torch.tensor([199], device="cuda")
        layers = [cases.layer_tensors(up, down, cos_sin, window=window) for window in (128, 0, 128)]
        caches, requests = [cases.filled_cache(16) for _ in layers], cases.request_of(200, 16)
        cases.run_step(layers, caches, cases.draw(1, cases.C), None, positions, requests)
        print(f"a whole step: {count} experts", flush=True)


PARTS = {
    "layers": (layers, "_few"),
    "attention": (attention, "attention_many"),
    "around": (around_products, "_many"),
    "experts": (experts, "experts_"),
    "prefill": (experts, "prefill_"),
    "step": (step, "decode_step"),
}
"""What is launched, and what its kernels' names share: torch's own kernels are not looked at."""


def let_every_lane_speak() -> None:
    """Compiles kernels as racecheck needs them; see the head of this file."""
    from vllm_gptoss.engine.kernels import nvrtc

    whole = nvrtc.source
    nvrtc.source = lambda path: "#define SPEAKERS 32\n" + whole(path)


def only(sanitizer: str, names: str) -> list[str]:
    """The option that keeps the sanitizer to kernels of these names, as this version spells it."""
    known = subprocess.run([sanitizer, "--help"], capture_output=True, text=True).stdout
    option = next((name for name in ("--kernel-name", "--kernel-regex", "--filter") if name in known), None)
    return [option, f"kns={names}"] if option else []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", default="memcheck,racecheck")
    parser.add_argument("--parallel", default="1,2,4,8", help="tensor-parallel sizes: launches the shapes of each")
    parser.add_argument("--experts", default="32", help="32 for the 20b, 128 for the 120b")
    parser.add_argument("--parts", default=",".join(PARTS), help="which of them, %(default)s")
    parser.add_argument("--run", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--speak", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        if options.speak:
            let_every_lane_speak()
        PARTS[options.run][0](
            [int(n) for n in options.parallel.split(",")], [int(n) for n in options.experts.split(",")]
        )
        return 0
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if sanitizer is None:
        print("compute-sanitizer is not on the PATH: it comes with the CUDA toolkit", file=sys.stderr)
        return 2
    worst = 0
    for tool in options.tools.split(","):
        for part in options.parts.split(","):
            began = time.monotonic()
            command = [sanitizer, "--tool", tool, "--error-exitcode", str(FOUND), *only(sanitizer, PARTS[part][1])]
            command += [sys.executable, "-m", "tests.gpu.sanitize", "--run", part]
            command += ["--parallel", options.parallel, "--experts", options.experts]
            command += ["--speak"] if tool == "racecheck" else []
            # every tensor its own allocation: torch's cache would hide accesses past its end
            done = subprocess.run(command, env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})
            said = {0: "clean", FOUND: "found something"}.get(done.returncode, f"ended with {done.returncode}")
            print(f"{tool}, {part}: {said}, {time.monotonic() - began:.0f} s", flush=True)
            worst = max(worst, abs(done.returncode))
    return worst


if __name__ == "__main__":
    sys.exit(main())
