"""The decode benchmark's arithmetic and files: a wrong floor, a wrong union or a lost run is a wrong claim."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import shapes
from benchmarks.decode import __main__ as decode
from benchmarks.decode import floor, memory, results, traces, worker
from benchmarks.decode.results import Results, ResultsError
from benchmarks.decode.worker import EngineRun
from tests.support import warm, warm_vllm
from vllm_gptoss.cli.recipes.model_config import model_config

ROOT = Path(__file__).parents[2]
JOB = EngineRun("20b", "plugin", (1, 8))
Bench = Callable[..., tuple[int, str, str]]


def test_overlapping_kernels_count_once() -> None:
    assert traces.busy_ns([(10, 11), (0, 5), (3, 8)]) == 9
    assert traces.busy_ns([(0, 10), (2, 3)]) == 10
    assert traces.busy_ns([]) == 0


@pytest.mark.parametrize(
    ("model", "batch", "floor_ms"),
    # bytes over 4.3 TB/s worked out by hand for 1,024 tokens of context, see docs/kernels/
    [("20b", 1, 0.87), ("20b", 8, 2.17), ("120b", 1, 1.17), ("120b", 8, 3.98)],
)
def test_the_floor_is_what_must_be_read(model: str, batch: int, floor_ms: float) -> None:
    speed = floor.bandwidth("NVIDIA H200")
    assert speed
    assert 1e3 * floor.read_bytes(shapes.SPECS[model], batch, 1024) / speed == pytest.approx(floor_ms, abs=0.005)


def test_the_floor_is_the_one_of_the_gpu_that_was_measured(tmp_path: Path) -> None:
    file = tmp_path / "of.json"
    floors = {}
    for gpu in ("NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA L4"):
        found = measured(plugin=[process(1.5, 3.0)])
        found.head["gpu"] = gpu
        found.write(file)
        floors[gpu[7:11]] = json.loads(file.read_text())["rows"][0]["floor_ms"]
    assert floors["H100"] == pytest.approx(floors["H200"] * 4.3 / 3.05)
    assert floors["L4"] is None


def test_skewed_routing_reads_four_experts_at_any_batch() -> None:
    model = shapes.SPECS["20b"]
    uniform, skewed = (floor.read_bytes(model, 16, 1, skew=skew) for skew in (False, True))
    assert skewed == pytest.approx(floor.read_bytes(model, 1, 16), rel=1e-3)
    assert uniform > 2 * skewed


def test_verifying_drafts_reads_the_experts_of_all_of_them() -> None:
    model = shapes.SPECS["20b"]
    assert floor.read_bytes(model, 1, 0, verified=4) == pytest.approx(floor.read_bytes(model, 4, 0))


def test_the_floor_of_accepted_drafts_is_that_of_a_token() -> None:
    found = Results({"gpu": "NVIDIA H200", "vllm": "0.33.0", "torch": "2.11.0", "date": "", "command": ""})
    for accepted in (0.0, 2.0):
        found.add_run(EngineRun("20b", "plugin", (1, 8), eagle3=3, accepted=accepted), process(1.5, 3.0))
    rows = {(row["accepted"], row["batch"]): row for row in results.summarise(found.measurements, "NVIDIA H200")}
    assert rows[2.0, 8]["floor_ms"] == pytest.approx(rows[0.0, 8]["floor_ms"] / 2)


def test_skew_sends_every_token_to_the_same_experts() -> None:
    router = torch.nn.Linear(96, 8, dtype=torch.bfloat16)
    layer = SimpleNamespace(mlp=SimpleNamespace(router=router))
    worker.skew_routing(SimpleNamespace(model=SimpleNamespace(layers=[layer], start_layer=0, end_layer=1)))
    chosen = router(torch.randn(64, 96).bfloat16() * 10).topk(4).indices
    assert chosen.sort().values.tolist() == [[0, 1, 2, 3]] * 64


def test_a_cut_shape_is_the_same_shape_with_fewer_layers() -> None:
    assert shapes.shape("120b:2").layers == 2
    assert shapes.shape("120b:2").experts == 128
    assert model_config(shapes.shape("20b:3"))["layer_types"].count("sliding_attention") == 2
    with pytest.raises(ValueError, match="there are 20b, 120b"):
        shapes.shape("7b")


def process(*tpots: float, batches: tuple[int, ...] = (1, 8)) -> dict[str, Any]:
    rows = [{"batch": b, "tpot_ms": [tpot], "prefill_ms": [100 * tpot]} for b, tpot in zip(batches, tpots, strict=True)]
    return {"start_s": 60.0, "rows": rows}


def measured(**variants: list[dict[str, Any]]) -> Results:
    found = Results({"gpu": "NVIDIA H200", "vllm": "0.33.0", "torch": "2.11", "date": "2026-01-01", "command": ""})
    for variant, rounds in variants.items():
        for one in rounds:
            found.add_run(EngineRun("20b", variant, (1, 8)), one)
    return found


def test_plugin_is_held_against_the_best_stock_backend_of_each_batch() -> None:
    found = measured(plugin=[process(1.5, 3.0), process(1.7, 3.2)], triton=[process(3.0, 4.8)])
    found.add_run(EngineRun("20b", "marlin", (1, 8)), process(2.8, 4.9))
    rows = results.summarise(found.measurements, found.head["gpu"])
    assert [(row["batch"], row["stock_backend"], row["stock_tpot_ms"]) for row in rows] == [
        (1, "marlin", 2.8),
        (8, "triton", 4.8),
    ]
    assert rows[0]["plugin_tpot_ms"] == pytest.approx(1.6)
    assert rows[0]["plugin_spread"] == pytest.approx(0.2 / 1.6)
    assert rows[0]["stock_prefill_ms"] == pytest.approx(280)
    assert rows[1]["tokens_per_s_gpu"] == pytest.approx(8e3 / 3.1)


def test_lengths_and_settings_are_never_mixed() -> None:
    found = measured(plugin=[process(1.5, 3.0)], triton=[process(3.0, 4.8)])
    found.add_run(EngineRun("20b", "marlin", (1, 8), prompt=8192), process(0.1, 0.1))
    found.add_run(EngineRun("20b", "marlin", (1, 8), skew=True), process(0.1, 0.1))
    found.add_run(EngineRun("20b", "marlin", (1, 8), options={"kv_cache_dtype": "fp8"}), process(0.1, 0.1))
    assert {row["stock_backend"] for row in results.summarise(found.measurements, found.head["gpu"])} == {"triton"}


def test_a_run_that_was_cut_short_is_continued_where_it_stopped(tmp_path: Path) -> None:
    found = measured(plugin=[process(1.5, batches=(1,))])
    found.write(tmp_path / "a.json")
    again = Results.read(tmp_path / "a.json")
    assert [again.done(JOB, batch) for batch in (1, 8)] == [1, 0]
    again.add_run(JOB, process(3.0, batches=(8,)))
    assert [row["batch"] for row in results.summarise(again.measurements, again.head["gpu"])] == [1, 8]
    again.merge(measured(plugin=[process(1.7, 3.2)], triton=[process(3.0, 4.8)]))
    again.write(tmp_path / "a.json")
    rows = json.loads((tmp_path / "a.json").read_text())["rows"]
    assert rows[0]["plugin_tpot_ms"] == pytest.approx(1.6)
    assert rows[0]["stock_backend"] == "triton"


def test_another_gpu_or_vllm_is_refused(tmp_path: Path) -> None:
    found, other = measured(plugin=[process(1.5, 3.0)]), measured()
    other.head["gpu"] = "NVIDIA H100"
    with pytest.raises(ResultsError, match="NVIDIA H100 here and NVIDIA H200 in the file"):
        found.merge(other)
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(ResultsError, match="is not a results file"):
        Results.read(tmp_path / "x.json")


def test_published_results_are_still_read() -> None:
    found = Results.read(ROOT / "benchmarks/results/decode-h200-2026-11-20.json")
    rows = results.summarise(found.measurements, found.head["gpu"])
    first = next(row for row in rows if row["model"] == "20b" and row["batch"] == 1)
    assert first["ratio"] == pytest.approx(2.04, abs=0.01)


def test_the_peak_of_loading_is_told_from_the_cache() -> None:
    # 14 GiB of weights, a peak of 20, then a cache of 110
    timeline = [0.5, 8, 14, 20, 14, 14, 124, 125, 125.5]
    assert memory.load_peak(timeline, 110) == 20
    # weights as large as the cache
    assert memory.load_peak([1, 61, 70, 61, 121, 122], 60) == 70
    assert memory.load_peak([], 60) is None
    assert memory.load_peak([1, 61], 0) is None


def test_settings_travel_in_a_variants_name(tmp_path: Path) -> None:
    job = EngineRun("20b", "plugin:layers=gptoss;experts=gptoss", (1, 4), tensor_parallel=2, eagle3=3)
    options = worker.engine_options(job, tmp_path)
    assert options["additional_config"] == {"gptoss": {"layers": "gptoss", "experts": "gptoss"}}
    assert "moe_backend" not in options
    assert options["compilation_config"]["cudagraph_capture_sizes"] == [1, 4, 16]
    assert worker.engine_options(EngineRun("20b", "marlin", (1,)), tmp_path)["moe_backend"] == "marlin"
    largest = EngineRun("20b", "plugin", (64,), options={"max_cudagraph_capture_size": 2048})
    assert "compilation_config" not in worker.engine_options(largest, tmp_path)


def test_vllm_takes_the_options_of_every_variant(tmp_path: Path) -> None:
    """EAGLE3, fp8 cache, prefix caching and pipelines are options of a run that costs GPU time to find wrong."""
    from vllm.engine.arg_utils import EngineArgs

    options = {"kv_cache_dtype": "fp8", "enable_prefix_caching": True, "pipeline_parallel_size": 2}
    job = EngineRun("tiny:6", "plugin", (1, 2), eagle3=3, accepted=2.4, options=options)
    config = EngineArgs(**worker.engine_options(job, tmp_path)).create_engine_config()
    draft = config.speculative_config.draft_model_config.hf_config
    assert draft.draft_vocab_size == shapes.shape("tiny").vocabulary
    fewer = EngineArgs(**worker.engine_options(replace(job, draft_vocabulary=32_000), tmp_path)).create_engine_config()
    assert fewer.speculative_config.draft_model_config.hf_config.draft_vocab_size == 32_000
    assert config.speculative_config.num_speculative_tokens == 3
    assert config.speculative_config.synthetic_acceptance_rates == pytest.approx([1.0, 0.4, 0.0])
    assert config.speculative_config.draft_model_config.architectures == ["LlamaForCausalLMEagle3"]
    assert (config.cache_config.cache_dtype, config.cache_config.enable_prefix_caching) == ("fp8", True)
    assert config.parallel_config.pipeline_parallel_size == 2


def test_lengths_are_read_as_people_write_them() -> None:
    assert decode.lengths("512/128,8k/1k") == [(512, 128), (8192, 1024)]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Bench:
    """Exit code and output of `python -m benchmarks.decode run`; its engines start with vLLM imported."""
    monkeypatch.setattr(worker, "subprocess", SimpleNamespace(Popen=warm_vllm.popen))
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")

    def run(*arguments: str) -> tuple[int, str, str]:
        command = ["run", "--models", "tiny", "--lengths", "16/8", "--repeats", "1"]
        command += ["--options", '{"enforce_eager": true}', "--out", str(tmp_path / "r.json"), *arguments]
        with pytest.raises(SystemExit) as ended:
            decode.app(command)
        return int(ended.value.code or 0), *capfd.readouterr()

    return run


@pytest.mark.slow
@pytest.mark.vllm
def test_the_command_measures_writes_and_continues(bench: Bench, tmp_path: Path) -> None:
    # vLLM has no MXFP4 experts for this CPU: a stock backend that cannot start must not cost the others their figures
    code, out, errors = bench("--variants", "triton,plugin", "--batches", "1", "--skew")
    assert code == 1, out + errors
    assert "triton: ended with 1" in errors
    record = json.loads((tmp_path / "r.json").read_text())
    assert record["rows"][0]["plugin_tpot_ms"] > 0
    assert 0.1 < record["rows"][0]["plugin_decode_ms"] / record["rows"][0]["plugin_tpot_ms"] < 20, "the same unit"
    assert record["measurements"][0]["rounds"][0]["rows"][0]["tokens_per_step"] == 1
    assert record["engines"][0]["kv_gib"] == pytest.approx(1, abs=0.01)
    assert record["failures"][0]["variant"] == "triton"
    code, out, errors = bench("--variants", "plugin", "--batches", "1,2", "--skew", "--budget", "350")
    assert code == 0, out + errors
    assert "batch 1:" not in out
    assert "batch 2:" in out
    assert [row["batch"] for row in json.loads((tmp_path / "r.json").read_text())["rows"]] == [1, 2]


@pytest.mark.vllm
def test_the_command_ends_with_its_budget(tmp_path: Path) -> None:
    command = ["-m", "benchmarks.decode", "run", "--models", "tiny"]
    command += ["--variants", "plugin", "--batches", "4", "--budget", "1", "--out", str(tmp_path / "r.json")]
    nothing = warm.run(command)
    assert nothing.returncode == 1
    assert "not measured, 1 s are left of 1" in nothing.stdout
