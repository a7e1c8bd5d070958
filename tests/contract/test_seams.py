"""The seams that no import or override shows: calls that vLLM makes, attributes it sets, orders it keeps."""

from __future__ import annotations

import ast
import re

import pytest

from tests.contract.seams import SEAMS, Seam, problem
from tests.contract.source import Release, find
from vllm_gptoss._vllm.replaced import CHAT_HANDLERS
from vllm_gptoss.server.streaming import direct_send


@pytest.mark.parametrize("seam", SEAMS, ids=lambda seam: seam.name)
def test_seam(release: Release, seam: Seam) -> None:
    assert problem(release, seam) == ""


def source(release: Release, module: str) -> str:
    path = release.module(module)
    assert path is not None, f"vLLM {release.version} has no module {module}"
    return path.read_text()


def test_the_app_knows_its_arguments_before_plugins_attach(release: Release) -> None:
    text = source(release, "vllm.entrypoints.launchers.app")
    assert -1 < text.find("app.state.args = args") < text.rfind("attach_endpoint_plugins(app")


@pytest.mark.parametrize("attribute", ["state.openai_serving_models =", "state.online_renderer =", "init_tool_server("])
def test_the_state_is_complete_when_plugins_start(release: Release, attribute: str) -> None:
    text = source(release, "vllm.entrypoints.launchers.api_server.app_state")
    assert -1 < text.find(attribute) < text.rfind("init_endpoint_plugins_state(")


TEXTS = (
    ("a handler's attribute is enough for stop strings", "vllm.entrypoints.openai.chat_completion.serving",
     "generator = self.engine_client.generate("),
    *(("the same", "vllm.entrypoints.generate.api_router", f"state.{handler} =") for handler in CHAT_HANDLERS),
    ("the route can be replaced", "vllm.entrypoints.openai.chat_completion.api_router", '"/v1/chat/completions"',
     "async def create_chat_completion(request: ChatCompletionRequest, raw_request: Request)"),
    ("the argument is read after we took it", "vllm.entrypoints.mcp.tool_server", 'getattr(args, "tool_server", None)'),
    ("setting the builder's window is all that it takes to plan once per step, and a step is planned as its graph was"
     " captured: nothing else of the batch differs between a capture and a replay",
     "vllm.v1.attention.backends.flash_attn", "if self.aot_sliding_window is None:",
     "self.aot_schedule and not fast_build",
     "window_size=_maybe_symmetrize_window(self.aot_sliding_window, causal)",
     "max_query_len = common_attn_metadata.max_query_len", "max_seq_len = common_attn_metadata.max_seq_len",
     "self.use_full_cuda_graph = (",
     "self.max_cudagraph_size = self.compilation_config.max_cudagraph_capture_size"),
    ("the same", "vllm.v1.worker.gpu.model_states.default", "max_seq_len = self.max_model_len"),
    ("the kernel of a graph may be chosen by the tokens of a request: no step with more of them replays it",
     "vllm.v1.worker.gpu.cudagraph_utils", "max_query_len=desc.max_query_len or desc.uniform_token_count",
     "or desc.uniform_token_count == uniform_token_count", "desc.max_query_len >= max_query_len"),
    ("the same", "vllm.v1.worker.gpu_model_runner", "self.uniform_decode_query_len = 1 + self.num_spec_tokens"),
    ("the fused layers may be in a graph: no step with an adapter replays one that was captured without",
     "vllm.lora.ops.triton_ops.lora_kernel_metadata",
     "no_lora = torch.all(token_lora_mapping == -1)\n        self.no_lora_flag_cpu[0] = no_lora"),
    ("the same", "vllm.lora.punica_wrapper.punica_gpu", "self.token_mapping_meta.prepare_tensors(self.token_lora"),
    ("the same", "vllm.lora.layers.base_linear", "self.base_layer = base_layer"),
    ("the same", "vllm.v1.worker.gpu.lora_utils", "return [0] + [c for c in captured if c > 0]"),
    ("the same", "vllm.v1.worker.gpu.cudagraph_utils", "desc.num_active_loras == num_active_loras",
     "lora_capture_hook(desc.num_active_loras, num_reqs, num_tokens)"),
)  # fmt: skip
"""Why something holds, and the code of vLLM that makes it so."""


@pytest.mark.parametrize("row", TEXTS, ids=lambda row: row[1])
def test_the_code_that_we_rely_on_is_there(release: Release, row: tuple[str, ...]) -> None:
    why, module, *needed = row
    text = source(release, module)
    assert [part for part in needed if part not in text] == [], why


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


def test_what_is_said_beside_tokens_is_five_values_and_an_error(release: Release) -> None:
    """As server/streaming/direct_send.py compares it; one more, and no text would be taken any more."""
    process = find(release, "vllm.v1.engine.output_processor", "OutputProcessor.process_outputs")
    assert process is not None
    calls = [node for node in ast.walk(process) if isinstance(node, ast.Call)]
    (call,) = [call for call in calls if ast.unparse(call.func) == "req_state.make_request_output"]
    assert len(call.args) == 1 + len(direct_send._NOTHING_ELSE)
    assert {keyword.arg for keyword in call.keywords} == set(direct_send._NO_ERROR)


def test_the_loader_still_tests_the_literal_quantisation_name(release: Release) -> None:
    """Why our config is registered under upstream's own name. Once this fails, a name of our own may do."""
    found = [
        path
        for path in (release.root / "vllm" / "model_executor" / "layers" / "fused_moe").rglob("routed_experts.py")
        if '"gpt_oss_mxfp4"' in path.read_text()
    ]
    assert found


def test_adapters_of_a_step_are_set_before_the_model_runs(release: Release) -> None:
    runner = source(release, "vllm.v1.worker.gpu.model_runner")
    assert runner.index("self._set_active_loras(*lora_inputs)") < runner.index("self.model(**model_inputs)")


def test_experts_outside_the_target_modules_are_not_wrapped(release: Release) -> None:
    """Why our experts, which vLLM makes as without LoRA, may stay."""
    text = source(release, "vllm.lora.model_manager")
    wraps = text[text.index("def _create_lora_modules") :]
    skips = wraps.index("not self._match_target_modules(module_name)")
    assert skips < wraps.index("continue", skips) < wraps.index("new_module = from_layer(")


def test_harmony_is_switched_on_by_the_model_type(release: Release) -> None:
    """Why the model keeps its `model_type`."""
    text = source(release, "vllm.renderers.online_renderer")
    assert '"gpt_oss"' in text
    assert any(isinstance(node, ast.Compare) for node in ast.walk(ast.parse(text)))


@pytest.mark.parametrize("part", ["parser", "plugins", "entrypoints"])
def test_no_announced_hook_has_appeared_unused(release: Release, part: str) -> None:
    """The plugin's routes should use the first, its parser override the others."""
    hook = re.compile(r"def (replace_route|classify_token_phases|supports_token_phase_classification)\b")
    assert [file for file in (release.root / "vllm" / part).rglob("*.py") if hook.search(file.read_text())] == []
    assert not list((release.root / "vllm" / "models").glob("gpt_oss*")), "the model class has another base there"
