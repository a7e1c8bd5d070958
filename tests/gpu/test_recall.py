"""The small model in gpt-oss-20b's shape generates the same tokens on CUDA as on a CPU, with every option, and the
expected kernels run.

The model was trained to recall its conversations (demo/README.md), so their tokens are the expected ones. Engines run
concurrently on one GPU. Each captures three graph sizes, so that every token band is replayed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from benchmarks.decode.worker import draft_config
from demo import verify
from demo.verify import Case
from demo.widen import LIKE_20B
from tests.gpu.marks import SM90, chosen
from tests.support import adapter, jobs
from vllm_gptoss.engine.spec import GPT_OSS_20B

pytestmark = [
    *SM90,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM for CUDA"),
]

ENGINE_GIB = 8
"""Of the GPU's memory, for an engine's weights, cache and graphs."""
GRAPHS = {"cudagraph_capture_sizes": [1, 8, 32, 64, 256]}
LAYERS = LIKE_20B.layers
WINDOW = LIKE_20B.window
ALL = {"fused_layers": LAYERS, "one_launch": LAYERS, "many_tokens": LAYERS, "own_experts": LAYERS}
SIX_LAUNCHES = ALL | {"one_launch": 0}
EXPERTS_ONLY = SIX_LAUNCHES | {"many_tokens": 0, "fused_layers": 0}
NOTHING = EXPERTS_ONLY | {"own_experts": 0}


@dataclass(frozen=True, slots=True)
class Situation:
    """One engine.

    paths: our kernels that must run; at_once: prompts of each round, None for all, "short" for those that fit into a
    window with their answers; args: of `vllm.LLM`.
    """

    paths: dict[str, int]
    at_once: tuple[int | Literal["short"] | None, ...] = (64,)
    args: dict[str, Any] = field(default_factory=dict)
    environ: dict[str, str] = field(default_factory=dict)
    job: dict[str, Any] = field(default_factory=dict)
    gpus: int = 1
    adapted: int = 0
    """The round in which every third request has a LoRA adapter, which changes its answer; the first has none."""


def wish(**settings: str) -> dict[str, Any]:
    return {"additional_config": {"gptoss": settings}}


def graphs(mode: str) -> dict[str, Any]:
    return {"compilation_config": GRAPHS | {"cudagraph_mode": mode}}


LORA = {"enable_lora": True, "max_lora_rank": 8}
ON_ATTENTION = {"lora_target_modules": ["qkv_proj", "o_proj"]}
EXAMPLE = {"kv_connector": "ExampleConnector", "kv_connector_extra_config": {"shared_storage_path": "FOLDER"}}
OFFLOADING = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"cpu_bytes_to_use": 2**30}}
CONNECTORS: dict[str, dict[str, Any]] = {
    "example": EXAMPLE,
    "offloading": OFFLOADING,
    "multi": {
        "kv_connector": "MultiConnector",
        "kv_connector_extra_config": {"connectors": [{**each, "kv_role": "kv_both"} for each in (EXAMPLE, OFFLOADING)]},
    },
}
"""FOLDER: a new one for each engine. vLLM's example takes caches of one kind only."""

OLDER: dict[str, dict[str, Any]] = {
    "prefixes from the cache": {"enable_prefix_caching": True},
    "prompts in chunks": {"max_num_batched_tokens": 64, "max_num_seqs": 32},
}
"""Options of the engines that run the kernels of GPUs before Hopper."""

SITUATIONS = {
    "one, 8, 32, 256 and all at once": Situation(ALL, (1, 1, 8, 32, "short", 256, None), {"max_num_seqs": 256}),
    "only FULL graphs": Situation(ALL, (1, 8, 64, "short"), graphs("FULL")),
    "only PIECEWISE graphs": Situation(EXPERTS_ONLY, (1, 8, 64), graphs("PIECEWISE")),
    "no graphs": Situation(ALL, (1, 8), {"enforce_eager": True}),
    "prefixes from the cache": Situation(ALL, (64, 64), {"enable_prefix_caching": True}),
    "prompts in chunks": Situation(ALL, (None,), {"max_num_batched_tokens": 64, "max_num_seqs": 32}),
    "preemption": Situation(ALL, (None,), {"kv_cache_memory_bytes": 2**26, "disable_log_stats": False}),
    "drafts by n-gram": Situation(
        ALL, (1, 64, "short"), {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
    ),
    "drafts by EAGLE3": Situation(SIX_LAUNCHES, (1, 64, "short"), {"speculative_config": {"method": "eagle3"}}),
    "drafts by n-gram in layers asked for": Situation(
        ALL,
        (1, 8, 64, "short"),
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}, **wish(layers="gptoss")},
    ),
    **{
        f"drafts by EAGLE3 in layers asked for, host {host}": Situation(
            SIX_LAUNCHES,
            (1, 8, 64, "short"),
            {"speculative_config": {"method": "eagle3"}, **wish(layers="gptoss", host=host)},
        )
        for host in ("stock", "gptoss")
    },
    "LoRA": Situation(NOTHING, (64,), LORA),
    "LoRA on attention": Situation(
        ALL, (1, 8, 64, 64, "short"), {**LORA, **ON_ATTENTION}, job={"steps": True}, adapted=3
    ),
    "LoRA on attention, layers upstream": Situation(
        EXPERTS_ONLY, (1, 8, 64, 64, "short"), {**LORA, **ON_ATTENTION, **wish(layers="upstream")}, adapted=3
    ),
    "KV cache of fp8": Situation(ALL, (1, 8, 64, "short"), {"kv_cache_dtype": "fp8"}, job={"steps": True}),
    "KV cache of fp8, stock": Situation({}, (64,), {"kv_cache_dtype": "fp8"}, {"VLLM_PLUGINS": "none"}),
    "drafts by n-gram, prefixes from the cache, preemption": Situation(
        ALL,
        (64, None),
        {
            "speculative_config": {"method": "ngram", "num_speculative_tokens": 3},
            "enable_prefix_caching": True,
            "kv_cache_memory_bytes": 2**26,
            "disable_log_stats": False,
            **wish(layers="gptoss"),
        },
    ),
    "asleep and awake": Situation(ALL, (8, 8), {"enable_sleep_mode": True}, job={"sleep": True}),
    **{
        f"KV connector: {name}": Situation(
            ALL,
            (1, 32, 32),
            {
                "kv_transfer_config": {"kv_role": "kv_both", **transfer},
                **wish(layers="gptoss"),
                "disable_hybrid_kv_cache_manager": name != "offloading",
            },
        )
        for name, transfer in CONNECTORS.items()
    },
    **{
        f"KV connector: offloading from {mib} MiB, host asked for": Situation(
            ALL,
            (1, 32, 64, 64),
            {
                "kv_transfer_config": {"kv_role": "kv_both", **OFFLOADING},
                **wish(layers="gptoss", host="gptoss"),
                "kv_cache_memory_bytes": mib * 2**20,
                "disable_hybrid_kv_cache_manager": False,
            },
            job={"steps": True},
        )
        for mib in (2048, 64)
    },
    "experts asked for": Situation(ALL, (256,), {"max_num_seqs": 256, **wish(experts="gptoss")}),
    "layers upstream": Situation(EXPERTS_ONLY, (1, 64), wish(layers="upstream")),
    "experts upstream": Situation(NOTHING, (1, 64), wish(experts="upstream", layers="upstream")),
    "stock": Situation({}, (1, 64), environ={"VLLM_PLUGINS": "none"}),
    **{
        f"as an A100, {name}": Situation(
            EXPERTS_ONLY,
            (1, 8, 64, "short"),
            {"attention_backend": "TRITON_ATTN", **wish(experts="gptoss", layers="attention"), **more},
            {"GPTOSS_TEST_ARCH": "sm80"},
        )
        for name, more in OLDER.items()
    },
    "two GPUs, vLLM's all-reduce": Situation(
        SIX_LAUNCHES | {"many_tokens": 0},
        (1, 64),
        {"tensor_parallel_size": 2, "disable_custom_all_reduce": True},
        gpus=2,
    ),
    "two GPUs": Situation(ALL, (1, 8, 24, "short", 256), {"tensor_parallel_size": 2, "max_num_seqs": 256}, gpus=2),
}
"""Two GPUs: an engine of several processes; the rest runs in one."""


def asked(cases: list[Case], count: int | Literal["short"] | None) -> list[Case]:
    """`count` of the cases, spread over all of them."""
    if count == "short":
        return [case for case in cases if len(case.prompt) + len(case.wanted) <= WINDOW]
    return cases if count is None else [cases[at * len(cases) // count] for at in range(count)]


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return verify.cases(0)


def job(situation: Situation, cases: list[Case], model: Path, draft: Path) -> dict[str, Any]:
    """What `tests.support.generate` runs."""
    args = {
        "enforce_eager": False, "max_model_len": 4096, "max_num_seqs": 64, "compilation_config": GRAPHS,
        "gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 2**31,
    } | situation.args  # fmt: skip
    if args.get("speculative_config", {}).get("method") == "eagle3":
        dummy = {"load_format": "dummy"}
        args["speculative_config"] |= {"model": str(draft), "num_speculative_tokens": 3, "draft_load_config": dummy}
    if "kv_transfer_config" in args:
        storage = json.dumps(args["kv_transfer_config"]).replace("FOLDER", tempfile.mkdtemp(dir=draft.parent))
        args["kv_transfer_config"] = json.loads(storage)
    rounds: list[list[dict[str, Any]]] = [
        [{"prompt": case.prompt, "max_tokens": len(case.wanted) + 8} for case in asked(cases, count)]
        for count in situation.at_once
    ]
    if situation.adapted:
        for request in rounds[situation.adapted][::3]:
            request["lora"] = str(draft.parent / "adapter")
    environ = {"VLLM_PLUGINS": "gptoss", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"} | situation.environ
    if situation.gpus > 1:
        environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    return {"model": str(model), "args": args, "rounds": rounds, "environ": environ, "paths": bool(situation.paths),
            "seconds": 420} | situation.job  # fmt: skip


def side_by_side() -> int:
    """Engines at once: a start is one core's work for a minute. Half of the memory is left to concurrent tests."""
    memory: int = torch.cuda.get_device_properties(0).total_memory >> 30
    return max(1, min(2 * (os.cpu_count() or 1) // 3, memory // 2 // ENGINE_GIB))


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, model_dir: Path, cases: list[Case], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, jobs.Results]]:
    """Of the situations that the chosen tests name."""
    base = tmp_path_factory.mktemp("recall")
    draft = base / "draft"
    draft.mkdir()
    config = draft_config(replace(GPT_OSS_20B, layers=LAYERS)) | {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}
    (draft / "config.json").write_text(json.dumps(config))
    adapter.write(base / "adapter", replace(GPT_OSS_20B, layers=LAYERS))
    gpus = torch.cuda.device_count()
    names = chosen(request, "name")
    wanted = {name: each for name, each in SITUATIONS.items() if name in names and each.gpus <= gpus}

    def run(name: str) -> jobs.Results:
        work = {"job": job(wanted[name], cases, model_dir, draft)}
        return jobs.run(work, base / name.replace(" ", "-"), timeout=440)

    with ThreadPoolExecutor(side_by_side()) as pool:
        yield dict(zip(wanted, pool.map(run, wanted), strict=True))


@pytest.mark.parametrize("name", SITUATIONS)
def test_every_answer_is_the_one_known_by_heart(name: str, results: dict[str, jobs.Results], cases: list[Case]) -> None:
    situation = SITUATIONS[name]
    if name not in results:
        pytest.skip(f"needs {situation.gpus} GPUs")
    rounds = results[name].rounds("job")
    for at, (count, answers) in enumerate(zip(situation.at_once, rounds, strict=True)):
        for number, (case, answer) in enumerate(zip(asked(cases, count), answers, strict=True)):
            known = not (at == situation.adapted > 0 and number % 3 == 0)
            assert (answer["tokens"] == case.wanted) is known, (at, count, case.source, case.name)
    assert results[name]["job"].get("paths", {}) == situation.paths, results[name].log("job")[-3000:]


@pytest.mark.parametrize("name", ["prefixes from the cache"])
def test_a_prefix_was_cached(name: str, results: dict[str, jobs.Results]) -> None:
    first, second = results[name].rounds("job")
    assert sum(answer["cached"] for answer in second) > sum(answer["cached"] for answer in first) + 1000


@pytest.mark.parametrize("name", [name for name in SITUATIONS if "preemption" in name])
def test_requests_were_preempted(name: str, results: dict[str, jobs.Results]) -> None:
    results[name].rounds("job")
    assert results[name]["job"]["preemptions"] > 0


@pytest.mark.parametrize("name", [name for name, each in SITUATIONS.items() if each.job.get("steps")])
def test_decode_steps_without_transfers_took_the_short_way(name: str, results: dict[str, jobs.Results]) -> None:
    results[name].rounds("job")
    steps = results[name]["job"]["steps"]
    assert steps["gptoss"] > 50, steps
    assert steps["upstream"] > 3, f"no step with a prompt or a transfer: {steps}"


@pytest.mark.parametrize("name", [name for name in SITUATIONS if "A100" in name])
def test_the_kernels_of_older_gpus_are_chosen_and_keep_running(name: str, results: dict[str, jobs.Results]) -> None:
    results[name].rounds("job")
    log = results[name].log("job")
    assert "experts: gptoss (asked for" in log, log[-3000:]
    assert "layers: attention (asked for" in log, log[-3000:]
    assert not re.search(r"(attention|experts): upstream from here on|attention of vLLM.s layers", log), log[-3000:]


def test_the_files_of_a_start_are_there() -> None:
    """An engine that silently measures stock is the usual mistake: the plugin is installed where vLLM looks."""
    from importlib.metadata import entry_points

    assert any(point.name == "gptoss" for point in entry_points(group="vllm.general_plugins")), os.environ.get(
        "PYTHONPATH"
    )
