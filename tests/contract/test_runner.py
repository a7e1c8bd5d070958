"""Facts about vLLM's model runner and scheduler on which `vllm_gptoss/engine/runner` is built.

`test_compatibility.py` finds a changed function; these tests show what a changed one must keep.
"""

from __future__ import annotations

import ast
import re

import pytest

from tests.contract.source import ROOT, Release, find, parameters, releases
from vllm_gptoss.engine import spec

RELEASES = [release for release in releases() if release.version == "0.33.0"]
GPU = "vllm.v1.worker.gpu"


@pytest.fixture(params=RELEASES, ids=lambda release: release.version)
def release(request: pytest.FixtureRequest) -> Release:
    found: Release = request.param
    return found


def test_the_input_batch_needs_nothing_that_we_do_not_give(release: Release) -> None:
    node = find(release, f"{GPU}.input_batch", "InputBatch")
    assert isinstance(node, ast.ClassDef)
    needed = {
        ast.unparse(field.target) for field in node.body if isinstance(field, ast.AnnAssign) and field.value is None
    }
    begin = ast.parse((ROOT / "vllm_gptoss" / "engine" / "runner" / "batch.py").read_text())
    calls = [
        node
        for node in ast.walk(begin)
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".InputBatch")
    ]
    (call,) = calls
    given = {keyword.arg for keyword in call.keywords}
    assert needed <= given <= set(parameters(node))


def test_a_kv_connector_is_notified_around_a_graph_and_after_sampling(release: Release) -> None:
    """`ShortWay` sends the same notifications with the same arguments, attention metadata excepted."""
    execute, sample = (find(release, f"{GPU}.model_runner", f"GPUModelRunner.{name}") for name in METHODS)
    assert execute is not None
    assert sample is not None
    text, after = ast.unparse(execute), ast.unparse(sample)
    graph = "model_output = self.cudagraph_manager.run_fullgraph(batch_desc)"
    told = "self.kv_connector.pre_forward(scheduler_output, input_batch, attn_metadata=attn_metadata)"
    assert re.search(rf"{re.escape(told)}\s+{re.escape(graph)}", text)
    assert text.index(graph) < text.index("self.kv_connector.finish_forward()")
    assert "defer_kv_finalize = self.speculator is not None" in after
    assert "self.kv_connector.post_forward(finished_req_ids, defer_finalize=defer_kv_finalize)" in after


METHODS = ("execute_model", "sample_tokens")
CONNECTORS = "vllm.distributed.kv_transfer.kv_connector.v1"
METADATA = {
    "offloading.common.OffloadingConnectorMetadata": {"load_jobs", "store_jobs", "jobs_to_flush"},
    "nixl.metadata.NixlConnectorMetadata": {
        "reqs_to_recv", "reqs_to_save", "reqs_to_send", "scheduler_clock", "reqs_in_batch", "reqs_not_processed",
        "heartbeat_by_engine", "push_registrations", "push_finished_blocks",
    },
    "lmcache_integration.vllm_v1_adapter.LMCacheConnectorMetadata": {"requests", "lookup_requests_in_step"},
    "lmcache_mp_connector.LMCacheMPConnectorMetadata": {"requests"},
    "multi_connector.MultiKVConnectorMetadata": {"metadata", "extra_async_saves"},
}  # fmt: skip
"""Fields that `eligibility.transfers` reads: empty where a step has no work, but the clock."""


@pytest.mark.parametrize("name", METADATA)
def test_the_work_of_a_connector_is_in_fields_that_we_know(release: Release, name: str) -> None:
    module, _, kind = name.rpartition(".")
    node = find(release, f"{CONNECTORS}.{module}", kind)
    assert node is not None
    fields = {
        ast.unparse(each.target).removeprefix("self.") for each in ast.walk(node) if isinstance(each, ast.AnnAssign)
    }
    assert fields == METADATA[name]


def test_attention_metadata_is_read_by_no_connector_that_we_notify(release: Release) -> None:
    """vLLM gives it to `start_load_kv` of steps in a FULL graph. Our graph builds it and it is not there afterwards."""
    folder = release.module(CONNECTORS).parent  # type: ignore[union-attr]
    readers = {path.relative_to(folder).parts[0] for path in folder.rglob("*.py") if READS.search(path.read_text())}
    assert readers == {"hisparse"}


READS = re.compile(r"""kwargs(\.get\(|\[)["']attn_metadata""")


def test_a_token_is_said_by_two_fields(release: Release) -> None:
    """`scheduler.EngineCoreOutput(name, tokens)`: the others have defaults, and mean nothing special then."""
    node = find(release, "vllm.v1.engine", "EngineCoreOutput")
    assert isinstance(node, ast.ClassDef)
    fields = {ast.unparse(field.target): field.value for field in node.body if isinstance(field, ast.AnnAssign)}
    assert list(fields)[:2] == ["request_id", "new_token_ids"]
    assert {name for name, value in fields.items() if value is None} == {"request_id", "new_token_ids"}
    assert {ast.unparse(value) for value in fields.values() if value is not None} == {"None", "0"}


def test_running_requests_can_be_passed_over(release: Release) -> None:
    """`scheduler.NEVER`: what vLLM's loop looks at before it takes a running request into a step."""
    schedule = find(release, "vllm.v1.core.sched.scheduler", "Scheduler.schedule")
    assert schedule is not None
    text = ast.unparse(schedule)
    passed = re.search(r"if self.current_step < request.next_decode_eligible_step:\s+req_index \+= 1\s+continue", text)
    assert passed.start() < text.index("num_new_tokens = request.num_tokens_with_spec")


def test_a_running_request_is_asked_for_in_one_way(release: Release) -> None:
    """`scheduler.NOTHING_SPECIAL`: another way would go unnoticed, and no search would be spared."""
    schedule = find(release, "vllm.v1.core.sched.scheduler", "Scheduler.schedule")
    assert schedule is not None
    calls = [node for node in ast.walk(schedule) if isinstance(node, ast.Call)]
    first = next(
        call for call in calls if ast.unparse(call.func).endswith(".allocate_slots") and len(call.keywords) < 3
    )
    assert [ast.unparse(argument) for argument in first.args] == ["request", "num_new_tokens"]
    assert [keyword.arg for keyword in first.keywords] == ["num_lookahead_tokens"]


def test_the_worker_can_be_named_before_the_platform_names_one(release: Release) -> None:
    config = release.module("vllm.config.vllm")
    text = config.read_text()
    assert text.index("self.try_verify_and_update_config()") < text.index(
        "current_platform.check_and_update_config(self)"
    )
    platform = release.module("vllm.platforms.cuda")
    assert 'if parallel_config.worker_cls == "auto":' in platform.read_text()
    assert (
        f'"{spec.ARCHITECTURE}": GptOssForCausalLMConfig'
        in (release.module("vllm.model_executor.models.config") or platform).read_text()
    )
    assert find(release, "vllm.v1.worker.gpu_worker", "Worker._make_model_runner") is not None


def test_sizes_of_graphs_that_were_set_are_kept(release: Release) -> None:
    """`choose/graph_sizes.py` sets them without a maximum: vLLM's entry adds none then, and later code takes theirs."""
    entry = find(release, "vllm.model_executor.models.config", "GptOssForCausalLMConfig.verify_and_update_config")
    assert entry is not None
    condition = (
        "compilation_config.cudagraph_capture_sizes is None and compilation_config.max_cudagraph_capture_size is None"
    )
    assert f"if {condition}:" in ast.unparse(entry)
    later = find(release, "vllm.config.vllm", "VllmConfig._set_cudagraph_sizes")
    assert later is not None
    assert "list(set(self.compilation_config.cudagraph_capture_sizes))" in ast.unparse(later)


@pytest.mark.parametrize("release", releases(), ids=lambda release: release.version)
def test_an_extension_adds_its_methods_to_the_worker_and_clients_call_them_by_name(release: Release) -> None:
    begin = find(release, "vllm.v1.worker.worker_base", "WorkerWrapperBase.init_worker")
    assert begin is not None
    assert "worker_class.__bases__ + (worker_extension_cls,)" in ast.unparse(begin)
    call = find(release, "vllm.v1.engine.async_llm", "AsyncLLM.collective_rpc")
    assert call is not None
    assert "method" in parameters(call)
