"""The seams that no import or override shows: calls that vLLM makes, attributes it sets, orders it keeps."""

from __future__ import annotations

import ast
import re

import pytest

from tests.contract.seams import SEAMS, Seam, problem
from tests.contract.source import Release, find, releases
from vllm_gptoss._vllm.replaced import CHAT_HANDLERS
from vllm_gptoss.server.streaming import direct_send

RELEASES = releases()


@pytest.mark.parametrize("release", RELEASES, ids=lambda release: release.version)
@pytest.mark.parametrize("seam", SEAMS, ids=lambda seam: seam.name)
def test_seam(release: Release, seam: Seam) -> None:
    assert problem(release, seam) == ""


def source(release: Release, module: str) -> str:
    path = release.module(module)
    assert path is not None, f"vLLM {release.version} has no module {module}"
    return path.read_text()


@pytest.mark.parametrize("release", RELEASES, ids=lambda release: release.version)
def test_the_app_knows_its_arguments_before_plugins_attach(release: Release) -> None:
    text = source(release, "vllm.entrypoints.launchers.app")
    assert -1 < text.find("app.state.args = args") < text.rfind("attach_endpoint_plugins(app")


@pytest.mark.parametrize("release", RELEASES, ids=lambda release: release.version)
@pytest.mark.parametrize("attribute", ["state.openai_serving_models =", "state.online_renderer =", "init_tool_server("])
def test_the_state_is_complete_when_plugins_start(release: Release, attribute: str) -> None:
    text = source(release, "vllm.entrypoints.launchers.api_server.app_state")
    assert -1 < text.find(attribute) < text.rfind("init_endpoint_plugins_state(")


@pytest.mark.parametrize("release", RELEASES, ids=lambda release: release.version)
@pytest.mark.parametrize("handler", CHAT_HANDLERS)
def test_chat_handlers_ask_their_engine_client_at_each_request(release: Release, handler: str) -> None:
    """Why an attribute of the handler is enough for stop strings."""
    assert f"state.{handler} =" in source(release, "vllm.entrypoints.generate.api_router")
    text = source(release, "vllm.entrypoints.openai.chat_completion.serving")
    assert "generator = self.engine_client.generate(" in text


@pytest.mark.parametrize("release", RELEASES, ids=lambda release: release.version)
def test_the_route_of_chat_completions_can_be_replaced(release: Release) -> None:
    text = source(release, "vllm.entrypoints.openai.chat_completion.api_router")
    assert '"/v1/chat/completions"' in text
    assert "async def create_chat_completion(request: ChatCompletionRequest, raw_request: Request)" in text


@pytest.mark.parametrize("release", RELEASES, ids=lambda release: release.version)
def test_a_chat_stream_begins_before_the_first_tokens_are_read(release: Release) -> None:
    """`chat_stream.py` adds the text that it has sent to the first result of vLLM's generator.

    The parser recognises it by the type of the list, so the list must reach the parser unchanged.
    """
    path = release.module("vllm.entrypoints.openai.chat_completion.serving")
    source = path.read_text()
    body = source[source.index("async for res in result_generator") : source.index("async def chat_completion_full")]
    assert body.index("first_iteration = False") < body.index("res.outputs")
    assert body.index("yield") < body.index("res.outputs")
    assert "as_list(output.token_ids)" in body


@pytest.mark.parametrize("release", RELEASES, ids=lambda release: release.version)
def test_what_is_said_beside_tokens_is_five_values_and_an_error(release: Release) -> None:
    """As server/streaming/direct_send.py compares it; one more, and no text would be taken any more."""
    process = find(release, "vllm.v1.engine.output_processor", "OutputProcessor.process_outputs")
    assert process is not None
    calls = [node for node in ast.walk(process) if isinstance(node, ast.Call)]
    (call,) = [call for call in calls if ast.unparse(call.func) == "req_state.make_request_output"]
    assert len(call.args) == 1 + len(direct_send._NOTHING_ELSE)
    assert {keyword.arg for keyword in call.keywords} == set(direct_send._NO_ERROR)


@pytest.mark.parametrize("release", RELEASES, ids=lambda release: release.version)
def test_the_tool_server_argument_is_read_after_we_took_it(release: Release) -> None:
    text = source(release, "vllm.entrypoints.mcp.tool_server")
    assert 'getattr(args, "tool_server", None)' in text


@pytest.mark.parametrize("release", RELEASES, ids=lambda release: release.version)
def test_the_loader_still_tests_the_literal_quantisation_name(release: Release) -> None:
    """Why our config is registered under upstream's own name. Once this fails, a name of our own may do."""
    found = [
        path
        for path in (release.root / "vllm" / "model_executor" / "layers" / "fused_moe").rglob("routed_experts.py")
        if '"gpt_oss_mxfp4"' in path.read_text()
    ]
    assert found


@pytest.mark.parametrize("release", RELEASES, ids=lambda release: release.version)
def test_flash_attention_plans_for_a_window_that_is_known_before_it_builds(release: Release) -> None:
    """Why setting the builder's window is all that it takes to plan once per step."""
    text = source(release, "vllm.v1.attention.backends.flash_attn")
    assert "if self.aot_sliding_window is None:" in text
    assert "self.aot_schedule and not fast_build" in text
    assert "window_size=_maybe_symmetrize_window(self.aot_sliding_window, causal)" in text


@pytest.mark.parametrize("release", RELEASES, ids=lambda release: release.version)
def test_a_plan_is_made_from_two_bounds_that_we_set(release: Release) -> None:
    """Why a step is planned as its graph was captured: the builder reads these of the batch, and nothing else that
    differs between a capture and a replay."""
    text = source(release, "vllm.v1.attention.backends.flash_attn")
    for needed in (
        "max_query_len = common_attn_metadata.max_query_len",
        "max_seq_len = common_attn_metadata.max_seq_len",
        "self.use_full_cuda_graph = (",
        "self.max_cudagraph_size = self.compilation_config.max_cudagraph_capture_size",
    ):
        assert needed in text
    assert find(release, "vllm.v1.attention.backend", "CommonAttentionMetadata.replace")
    assert find(release, "vllm.config.compilation", "CUDAGraphMode.separate_routine")
    assert find(release, "vllm.config.vllm", "VllmConfig.num_speculative_tokens")
    assert "max_seq_len = self.max_model_len" in source(release, "vllm.v1.worker.gpu.model_states.default")


@pytest.mark.parametrize("release", RELEASES, ids=lambda release: release.version)
def test_a_graph_of_drafts_is_captured_and_replayed_with_one_number_of_tokens(release: Release) -> None:
    """Why the kernel of a graph may be chosen by the tokens of a request: no step with more of them replays it."""
    graphs = source(release, "vllm.v1.worker.gpu.cudagraph_utils")
    assert "max_query_len=desc.max_query_len or desc.uniform_token_count" in graphs
    assert "or desc.uniform_token_count == uniform_token_count" in graphs
    assert "desc.max_query_len >= max_query_len" in graphs
    v1 = source(release, "vllm.v1.worker.gpu_model_runner")
    assert "self.uniform_decode_query_len = 1 + self.num_spec_tokens" in v1


@pytest.mark.parametrize("release", RELEASES, ids=lambda release: release.version)
def test_steps_without_an_adapter_have_a_flag_and_graphs_of_their_own(release: Release) -> None:
    """Why the fused layers may be in a graph: no step with an adapter replays one that was captured without."""
    flag = source(release, "vllm.lora.ops.triton_ops.lora_kernel_metadata")
    assert "no_lora = torch.all(token_lora_mapping == -1)\n        self.no_lora_flag_cpu[0] = no_lora" in flag
    assert "self.token_mapping_meta.prepare_tensors(self.token_lora" in source(
        release, "vllm.lora.punica_wrapper.punica_gpu"
    )
    assert "self.base_layer = base_layer" in source(release, "vllm.lora.layers.base_linear")
    assert "return [0] + [c for c in captured if c > 0]" in source(release, "vllm.v1.worker.gpu.lora_utils")
    graphs = source(release, "vllm.v1.worker.gpu.cudagraph_utils")
    assert "lora_capture_hook(desc.num_active_loras, num_reqs, num_tokens)" in graphs
    assert "desc.num_active_loras == num_active_loras" in graphs
    runner = source(release, "vllm.v1.worker.gpu.model_runner")
    assert runner.index("self._set_active_loras(*lora_inputs)") < runner.index("self.model(**model_inputs)")


@pytest.mark.parametrize("release", RELEASES, ids=lambda release: release.version)
def test_experts_outside_the_target_modules_are_not_wrapped(release: Release) -> None:
    """Why our experts, which vLLM makes as without LoRA, may stay."""
    text = source(release, "vllm.lora.model_manager")
    wraps = text[text.index("def _create_lora_modules") :]
    skips = wraps.index("not self._match_target_modules(module_name)")
    assert skips < wraps.index("continue", skips) < wraps.index("new_module = from_layer(")


@pytest.mark.parametrize("release", RELEASES, ids=lambda release: release.version)
def test_harmony_is_switched_on_by_the_model_type(release: Release) -> None:
    """Why the model keeps its `model_type`."""
    text = source(release, "vllm.renderers.online_renderer")
    assert '"gpt_oss"' in text
    assert any(isinstance(node, ast.Compare) for node in ast.walk(ast.parse(text)))


@pytest.mark.parametrize("release", RELEASES, ids=lambda release: release.version)
@pytest.mark.parametrize("part", ["parser", "plugins", "entrypoints"])
def test_no_announced_hook_has_appeared_unused(release: Release, part: str) -> None:
    """The plugin's routes should use the first, its parser override the others."""
    hook = re.compile(r"def (replace_route|classify_token_phases|supports_token_phase_classification)\b")
    assert [file for file in (release.root / "vllm" / part).rglob("*.py") if hook.search(file.read_text())] == []
    assert not list((release.root / "vllm" / "models").glob("gpt_oss*")), "the model class has another base there"
