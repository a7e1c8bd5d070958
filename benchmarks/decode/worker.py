"""One process of the decode benchmark: `python -m benchmarks.decode.worker JOB RESULT`.

vLLM's engine runs in this process (its workers do not, above one GPU); functions for GPU times, memory and skewed
routing are sent to the workers, so one GPU and several are measured alike. The result is written when the engine is up
and after every batch, so a stopped process has results.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import shapes
from benchmarks.decode import traces
from vllm_gptoss.cli.bench.worker import environment, is_plugin, variant_options
from vllm_gptoss.cli.recipes.model_config import model_config
from vllm_gptoss.engine import spec


@dataclasses.dataclass(frozen=True)
class EngineRun:
    """What one process measures.

    variant: `plugin`, `plugin:layers=upstream;experts=triton` (plugin settings), or a name of vLLM's `--moe-backend`.
    eagle3: draft tokens per step, 0 for none; accepted: mean tokens of a request and step that vLLM's synthetic
    acceptance gives, 0: what the draft earns; draft_vocabulary: tokens that the draft may propose, 0: all (published
    drafts have 32,000 or all); options: further engine arguments; seconds: stop after so many, 0: never.
    """

    model: str
    variant: str
    batches: tuple[int, ...]
    prompt: int = 512
    output: int = 128
    repeats: int = 3
    tensor_parallel: int = 1
    skew: bool = False
    eagle3: int = 0
    accepted: float = 0.0
    draft_vocabulary: int = 0
    profile: bool = True
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0

    @property
    def is_plugin(self) -> bool:
        return is_plugin(self.variant)


def put(path: Path, text: str) -> None:
    """Writes a temporary file and renames it: a reader of `path` always sees a complete text."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(text)
    os.replace(part, path)


def draft_config(model: spec.ModelSpec, vocabulary: int = 0) -> dict[str, Any]:
    """`config.json` of an EAGLE3 draft for `model`, as the published drafts have it: one Llama layer, same width.
    vocabulary: tokens that it may propose, 0 for all.

    Raises:
        ValueError: fewer than six layers: vLLM gives the draft the states of layers 2, N / 2 and N - 3.
    """
    if model.layers < 6:
        raise ValueError(f"an EAGLE3 draft reads three layers of the model: six at least, not {model.layers}")
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": model.hidden,
        "intermediate_size": 6 * model.hidden,
        "num_attention_heads": model.query_heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_size,
        "hidden_act": "silu",
        "vocab_size": model.vocabulary,
        "draft_vocab_size": vocabulary or model.vocabulary,
        "max_position_embeddings": spec.MAX_POSITIONS,
        "rms_norm_eps": spec.RMS_NORM_EPS,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


def engine_options(job: EngineRun, directory: Path) -> dict[str, Any]:
    """Arguments of `vllm.LLM` for a job; writes the configs that they name into `directory`."""
    model = shapes.shape(job.model)
    (directory / "config.json").write_text(json.dumps(model_config(model)))
    verified = 1 + job.eagle3
    sizes = sorted({*job.batches, 1})
    options: dict[str, Any] = {
        "model": str(directory),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
        "max_model_len": job.prompt + job.output + 64,
        "max_num_seqs": max(sizes),
        "tensor_parallel_size": job.tensor_parallel,
        # a request has `verified` tokens for the model and the draft's first pass, one for its others
        "compilation_config": {
            "cudagraph_capture_sizes": sorted({size * each for size in sizes for each in (1, verified)})
        },
    }
    if job.eagle3:
        (directory / "draft").mkdir(exist_ok=True)
        (directory / "draft" / "config.json").write_text(json.dumps(draft_config(model, job.draft_vocabulary)))
        draft: dict[str, Any] = {
            "method": "eagle3",
            "model": str(directory / "draft"),
            "num_speculative_tokens": job.eagle3,
        }
        if job.accepted:
            draft |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": job.accepted}
        options["speculative_config"] = draft
    options |= variant_options(job.variant)
    if "max_cudagraph_capture_size" in job.options:
        del options["compilation_config"]  # vLLM refuses sizes that end elsewhere
    return {**options, **job.options}


def measure(job: EngineRun, save: Callable[[dict[str, Any]], None]) -> None:
    """Runs one job in this process; `save` gets everything known so far, after every batch."""
    if job.is_plugin:
        from vllm_gptoss.plugin import register

        register()
    from vllm import LLM

    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        engine = LLM(**engine_options(job, Path(directory)))
    start_s = time.perf_counter() - began
    if job.skew:
        engine.apply_model(skew_routing)
    result: dict[str, Any] = {**engine.collective_rpc(machine)[0], "rows": [], "start_s": start_s}
    result["memory"] = engine.collective_rpc(memory)
    result["kv_blocks"] = engine.llm_engine.vllm_config.cache_config.num_gpu_blocks
    run = _runner(engine, job.prompt)
    save(result)
    longest = 0.0
    for batch in job.batches:
        used = time.perf_counter() - began
        if job.seconds and used + longest > job.seconds:
            break
        result["rows"].append(_row(engine, job, run, batch))
        longest = max(longest, time.perf_counter() - began - used)
        save(result)


def _runner(engine: Any, prompt: int) -> Callable[[int, int], float]:
    import numpy as np
    from vllm import SamplingParams

    def run(batch: int, tokens: int) -> float:
        """Seconds for `tokens` greedy tokens to each of `batch` random prompts, the same in every run.

        Raises:
            RuntimeError: a request got fewer, as beyond `max_model_len`: its time per token would be wrong.
        """
        random = np.random.default_rng(batch)
        prompts = [{"prompt_token_ids": random.integers(0, 190_000, prompt).tolist()} for _ in range(batch)]
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        engine.collective_rpc(traces.synchronize)
        begin = time.perf_counter()
        answers = engine.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - begin
        if (least := min(len(answer.outputs[0].token_ids) for answer in answers)) < tokens:
            raise RuntimeError(f"a request got {least} of {tokens} tokens")
        return seconds

    return run


def _row(engine: Any, job: EngineRun, run: Callable[[int, int], float], batch: int) -> dict[str, Any]:
    def busy() -> float:
        return float(engine.collective_rpc(processor)[0])

    run(batch, min(8, job.output))
    tpots, prefills, hosts = [], [], []
    for _ in range(job.repeats):
        marks = [busy()]
        first = run(batch, 1)
        marks.append(busy())
        whole = run(batch, job.output)
        marks.append(busy())
        tpots.append(1e3 * (whole - first) / (job.output - 1))
        hosts.append(1e3 * (marks[2] - 2 * marks[1] + marks[0]) / (job.output - 1))
        prefills.append(1e3 * first)
    row: dict[str, Any] = {"batch": batch, "tpot_ms": tpots, "prefill_ms": prefills, "host_ms": hosts}
    return row | traces.decoding(engine, batch, job.prompt, job.output, profile=job.profile)


# What runs in vLLM's workers. Each takes the worker, or the model, and returns plain data.


def skew_routing(model: Any) -> None:
    """Sends every token to the first four experts: their router bias outweighs any logit."""
    for index in range(model.model.start_layer, model.model.end_layer):
        model.model.layers[index].mlp.router.bias.data[:4] = 1e4


def processor(worker: Any) -> float:
    """Seconds of processor time of the thread that runs the worker, which is the engine's where there is one GPU."""
    return time.thread_time()


def machine(worker: Any) -> dict[str, str]:
    import torch

    from vllm_gptoss.engine.choose import device

    return {"gpu": device.detect().name, "torch": torch.__version__}


def memory(worker: Any) -> dict[str, float]:
    """GiB of one rank: KV cache, most that torch has held allocated since vLLM's own profiling, most reserved."""
    import torch

    caches = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in worker.model_runner.kv_caches}
    found = {"kv_gib": sum(caches.values()) / 2**30}
    if torch.cuda.is_available():
        found["allocated_gib"] = torch.cuda.max_memory_allocated() / 2**30
        found["reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
    return found


@contextlib.contextmanager
def started(job: EngineRun, result: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The process that runs `main` for a job, with its own group, which does not outlive the block."""
    command = [sys.executable, "-m", "benchmarks.decode.worker", json.dumps(dataclasses.asdict(job)), str(result)]
    process = subprocess.Popen(command, env=environment(job.variant), stdout=sys.stderr, start_new_session=True)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def main(job: str, result: str) -> None:
    fields = json.loads(job)
    fields["batches"] = tuple(fields["batches"])

    measure(EngineRun(**fields), lambda record: put(Path(result), json.dumps(record)))


if __name__ == "__main__":
    # by their real module name, so that functions sent to workers are found there
    from benchmarks.decode import worker

    worker.main(*sys.argv[1:])
