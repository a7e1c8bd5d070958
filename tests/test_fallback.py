"""A fault at any step leads to vLLM's path and one log line; an explicit request leads to an error. vLLM is a fake."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from tests.support import planted
from tests.support.vllm_log import lines
from vllm_gptoss import fallback, startup_line
from vllm_gptoss.engine import choose
from vllm_gptoss.engine.attention import decode
from vllm_gptoss.engine.attention import sm90 as planned
from vllm_gptoss.engine.choose import ChoiceError, Deployment, device
from vllm_gptoss.engine.choose import vllm_config as describe
from vllm_gptoss.engine.choose.device import Device
from vllm_gptoss.engine.experts import config as quantization
from vllm_gptoss.engine.experts import method
from vllm_gptoss.engine.kernels import nvrtc, step
from vllm_gptoss.engine.model import addresses, fused_path, gpt_oss, layer_upto16, layer_upto512, one_token
from vllm_gptoss.engine.spec import GPT_OSS_20B

pytestmark = pytest.mark.vllm

H200 = Device("nvidia", "NVIDIA H200", "sm90", 139.8)
FIRST = torch.zeros(1, dtype=torch.int64)


def wishing(**settings: str) -> Any:
    """A `VllmConfig` of which only the plugin's settings are read: `describe` is a fake."""
    return SimpleNamespace(additional_config={"gptoss": settings}, load_config=None)


# The model


@pytest.fixture
def vllm_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's gpt-oss as a name, and kernels that compile to nothing, on an H200 by name."""
    upstream = gpt_oss.UpstreamGptOssForCausalLM

    def built(self: Any, **_: Any) -> None:
        torch.nn.Module.__init__(self)
        self.model = SimpleNamespace(
            layers=[None, None],
            start_layer=0,
            end_layer=2,
            aux_hidden_state_layers=(),
            embed_input_ids=lambda ids: torch.zeros(len(ids), 2880),
            norm=lambda x, residual: ("ours", residual),
            _maybe_add_hidden_state=lambda aux, index, x, residual: aux,
        )

    tensors = SimpleNamespace(experts=None, window=0, cos_sin=torch.zeros(1))
    attention = SimpleNamespace(kv_cache=None)
    experts = SimpleNamespace(many=object(), kernel=lambda tokens: "ours")
    place = SimpleNamespace(tensors=tensors, attention=attention, requests=lambda _: None, others=None, experts=experts,
                            weights=(), layer=None, cache=None)  # fmt: skip
    monkeypatch.setattr(upstream, "__init__", built)
    monkeypatch.setattr(upstream, "forward", lambda *_: "upstream")
    monkeypatch.setattr(gpt_oss, "LoadCheck", lambda config: None)
    monkeypatch.setattr(device, "detect", lambda: H200)
    monkeypatch.setattr(describe, "configuration", lambda config: Deployment(GPT_OSS_20B))
    monkeypatch.setattr(describe, "built_model", lambda deployment, model: deployment)
    monkeypatch.setattr(describe, "first_step", lambda deployment, places, auxiliary: deployment)
    monkeypatch.setattr(decode, "set_up", lambda model, per_request=1: True)
    monkeypatch.setattr(fused_path.FusedPath, "could_take", lambda self, tokens: tokens <= self.most)
    monkeypatch.setattr(addresses, "look_up", lambda layer, rank: place)
    monkeypatch.setattr(fused_path.worker, "tensor_parallel_rank", lambda: 0)
    monkeypatch.setattr(fused_path.worker, "is_last_pipeline_rank", lambda: True)
    monkeypatch.setattr(nvrtc, "at_once", lambda loads: None)
    monkeypatch.setattr(step, "Step", lambda tensors, eps, element, ranks: SimpleNamespace(compile=lambda: None))
    monkeypatch.setattr(one_token.OneToken, "__call__", lambda self, x, *_: (x, x))
    monkeypatch.setattr(layer_upto16, "layer", lambda tensors, cache, requests, positions, x, *_, **__: (x, x))
    monkeypatch.setattr(layer_upto512, "layer", lambda tensors, experts, cache, requests, positions, x, *_: (x, x))


def serve(layers: str, tokens: int = 1) -> list[Any]:
    """Output of two steps of a new model."""
    model = gpt_oss.GptOssForCausalLM(vllm_config=wishing(layers=layers))
    return [model.forward(FIRST.expand(tokens), FIRST.expand(tokens)) for _ in range(2)]


@pytest.mark.parametrize("tokens", [1, 2, 17, 512])
def test_without_a_fault_the_fused_path_serves(vllm_model: None, said: pytest.LogCaptureFixture, tokens: int) -> None:
    assert serve("auto", tokens) == ["ours", "ours"]
    assert serve("gptoss", tokens) == ["ours", "ours"]
    assert lines(said) == []


L40S = Device("nvidia", "NVIDIA L40S", "sm89", 44.4)


@pytest.mark.parametrize(
    ("there", "layers", "ours"),
    [
        (H200, "auto", {"FLASH_ATTN": "GptOssFlashAttentionBackend"}),
        (H200, "upstream", {}),
        (L40S, "attention", {"TRITON_ATTN": "GptOssTritonAttentionBackend"}),
        (L40S, "auto", {}),
    ],
)
def test_vllm_builds_layers_with_our_attention_where_they_may_be_ours(
    vllm_model: None, monkeypatch: pytest.MonkeyPatch, there: Device, layers: str, ours: dict[str, str]
) -> None:
    upstream, seen = gpt_oss.UpstreamGptOssForCausalLM, []
    built, stock = upstream.__init__, {"FLASH_ATTN": "FlashAttentionBackend", "TRITON_ATTN": "TritonAttentionBackend"}

    def names() -> dict[str, str]:
        return {name: AttentionBackendEnum[name].get_class().__name__ for name in stock}

    def building(self: Any, **given: Any) -> None:
        seen.append(names())
        built(self, **given)

    monkeypatch.setattr(upstream, "__init__", building)
    monkeypatch.setattr(device, "detect", lambda: there)
    monkeypatch.setattr(planned.worker, "flash_attention_version", lambda: 3)
    gpt_oss.GptOssForCausalLM(vllm_config=wishing(layers=layers))
    assert seen == [stock | ours]
    assert names() == stock


@pytest.mark.parametrize("where", planted.LAYERS)
def test_a_fault_of_the_layers_leaves_upstreams_and_one_line(
    vllm_model: None, monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture, where: str
) -> None:
    planted.plant(where, monkeypatch.setattr)
    tokens = 2 if where.endswith("layer_upto16:layer") else 1
    assert serve("auto", tokens) == ["upstream", "upstream"]
    assert lines(said) == [f"layers: upstream from here on (RuntimeError: {planted.MESSAGE})"]


def test_a_fault_of_many_tokens_leaves_the_few(
    vllm_model: None, monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture
) -> None:
    planted.plant("vllm_gptoss.engine.model.layer_upto512:layer", monkeypatch.setattr)
    model = gpt_oss.GptOssForCausalLM(vllm_config=wishing(layers="gptoss"))
    sizes = (17, 2, 17, 1)
    answers = [model.forward(FIRST.expand(tokens), FIRST.expand(tokens)) for tokens in sizes]
    assert answers == ["upstream", "ours", "upstream", "ours"]
    assert lines(said) == [f"layers of many tokens: upstream from here on (RuntimeError: {planted.MESSAGE})"]


@pytest.mark.parametrize("where", planted.LAYERS)
def test_layers_that_were_asked_for_by_name_end_in_an_error(
    vllm_model: None, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    planted.plant(where, monkeypatch.setattr)
    with pytest.raises(ChoiceError, match=f"layers=gptoss cannot run here: RuntimeError: {planted.MESSAGE}"):
        serve("gptoss", 2 if where.endswith("layer_upto16:layer") else 1)


def test_a_cache_that_the_kernels_do_not_read_is_one_line(
    vllm_model: None, monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture
) -> None:
    strange = Deployment(GPT_OSS_20B, caches=(choose.KvCache((2, 4, 16, 8, 64), "bfloat16", 1),))
    monkeypatch.setattr(describe, "first_step", lambda *_: strange)
    assert serve("auto") == ["upstream", "upstream"]
    [line] = lines(said)
    assert "layers: upstream from here on" in line
    assert "the KV cache has shape [2, 4, 16, 8, 64]" in line


@pytest.mark.parametrize("name", ["LoadCheck", "startup_line.say"])
def test_what_only_checks_or_tells_ends_no_start(
    vllm_model: None, monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture, name: str
) -> None:
    owner, _, attribute = ("." + name).rpartition(".")
    monkeypatch.setattr(startup_line if owner else gpt_oss, attribute, planted.fail)
    assert serve("auto") == ["ours", "ours"]
    assert len(lines(said)) == 1


# The experts


@pytest.fixture
def vllm_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's MoE method as a name, on an H200 by name."""
    upstream = method.GptOssMxfp4MoEMethod
    stock = SimpleNamespace(mxfp4_backend=SimpleNamespace(value="MARLIN"))
    of = quantization.GptOssMxfp4Config
    monkeypatch.setattr(of, "_make_moe_method", lambda self, moe: SimpleNamespace(**vars(stock), moe=moe))
    monkeypatch.setattr(upstream, "__init__", lambda self, moe: object.__setattr__(self, "moe", moe))
    monkeypatch.setattr(upstream, "process_weights_after_loading", lambda self, layer: layer.done.append("laid out"))
    monkeypatch.setattr(upstream, "apply_monolithic", lambda *_: "upstream")
    monkeypatch.setattr(device, "detect", lambda: H200)
    monkeypatch.setattr(describe, "configuration", lambda config: Deployment(GPT_OSS_20B))
    monkeypatch.setattr(describe, "built_experts", lambda deployment, *_: deployment)
    monkeypatch.setattr(method.GptOssExpertsMethod, "__setattr__", object.__setattr__)
    monkeypatch.setattr(method.GptOssExpertsMethod, "__getattr__", lambda self, name: None, raising=False)
    monkeypatch.setattr(method.GptOssExpertsMethod, "_projection", lambda *_: None)
    monkeypatch.setattr(method.sm90, "reserve", lambda *_: None)
    monkeypatch.setattr(method.sm90, "sample", lambda *_: None)
    few: Any = SimpleNamespace(max_tokens=64)
    monkeypatch.setattr(method.sm90, "prepare", lambda *_, **__: method.sm90.LayerExperts(few))
    monkeypatch.setattr(method.sm90, "apply", lambda *_: "ours")


def load_and_run(monkeypatch: pytest.MonkeyPatch, wish: str) -> tuple[Any, list[str], list[Any]]:
    """(the backend that vLLM received, what its loading did, what two steps answer)."""
    monkeypatch.setattr(quantization._vllm, "current_config", lambda: wishing(experts=wish))
    moe = SimpleNamespace(moe_backend="auto", is_lora_enabled=False, experts_per_token=4, num_experts=32)
    made = quantization.GptOssQuantConfig()._make_moe_method(moe)
    if not isinstance(made, method.GptOssExpertsMethod):
        return moe.moe_backend, [], ["upstream", "upstream"]
    names = ("w13_weight", "w13_weight_scale", "w13_bias", "w2_weight", "w2_weight_scale", "w2_bias")
    done: list[str] = []
    layer = SimpleNamespace(expert_map=None, done=done, **{name: torch.zeros(1) for name in names})
    made.process_weights_after_loading(layer)
    steps = [made.apply_monolithic(layer, torch.zeros(1, 64), torch.zeros(1, 32)) for _ in range(2)]
    return moe.moe_backend, done, steps


def test_with_lora_on_attention_vllm_makes_the_experts_without_it(
    vllm_experts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's experts that take adapters have another layout, which our kernels do not read."""
    found = Deployment(GPT_OSS_20B, lora_on_attention=True)
    monkeypatch.setattr(describe, "configuration", lambda config: found)
    for wish, lora in (("gptoss", False), ("auto", False), ("upstream", True)):
        monkeypatch.setattr(quantization._vllm, "current_config", lambda wish=wish: wishing(experts=wish))
        moe = SimpleNamespace(moe_backend="auto", is_lora_enabled=True, experts_per_token=4, num_experts=32)
        made = quantization.GptOssQuantConfig()._make_moe_method(moe)
        assert (isinstance(made, method.GptOssExpertsMethod), moe.is_lora_enabled) == (not lora, lora)


def test_without_a_fault_our_experts_serve(
    vllm_experts: None, monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture
) -> None:
    for wish in ("auto", "gptoss"):
        assert load_and_run(monkeypatch, wish) == ("triton", ["laid out"], ["ours", "ours"])
    assert lines(said) == []


@pytest.mark.parametrize("where", planted.EXPERTS)
def test_a_fault_of_the_experts_leaves_upstreams_and_one_line(
    vllm_experts: None, monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture, where: str
) -> None:
    planted.plant(where, monkeypatch.setattr)
    backend, done, steps = load_and_run(monkeypatch, "auto")
    assert steps == ["upstream", "upstream"]
    if backend != "auto":  # vLLM's own choice, where the plugin's was never built
        assert done == ["laid out"]
    assert lines(said) == [f"experts: upstream from here on (RuntimeError: {planted.MESSAGE})"]


@pytest.mark.parametrize("where", planted.EXPERTS)
def test_experts_that_were_asked_for_by_name_end_in_an_error(
    vllm_experts: None, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    planted.plant(where, monkeypatch.setattr)
    with pytest.raises(ChoiceError, match=f"experts=gptoss cannot run here: RuntimeError: {planted.MESSAGE}"):
        load_and_run(monkeypatch, "gptoss")


def test_the_same_reason_in_every_layer_is_one_line(said: pytest.LogCaptureFixture) -> None:
    for _ in range(24):
        assert fallback.attempt("experts", "auto", planted.fail) is None
    assert len(lines(said)) == 1


def test_a_rank_whose_neighbour_stepped_aside_does_so_too(
    vllm_model: None, monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture
) -> None:
    """At the start and after the first step has compiled: ranks on different paths would deadlock."""
    for disagree in ([False], [True, False]):
        fallback._said.clear()
        said.clear()
        answers = iter(disagree)
        monkeypatch.setattr(fallback.worker, "all_ranks", lambda yes, answers=answers: next(answers))
        assert serve("auto") == ["upstream", "upstream"]
        assert lines(said) == ["layers: upstream from here on (another rank stepped aside)"]


@pytest.mark.parametrize("tokens", [1, 2, 17])
def test_a_fault_of_one_rank_ends_its_process(vllm_model: None, monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    """vLLM only logs an exception of a rank other than the first: its peers would wait, or take its next step's rows.

    `WorkerProc._execute_worker_rpc` catches an `Exception`, not this.
    """
    monkeypatch.setattr(describe, "configuration", lambda config: Deployment(GPT_OSS_20B, tensor_parallel=2))
    monkeypatch.setattr(fused_path.FusedPath, "connect", lambda self: None)
    for where in ("one_token:OneToken.__call__", "layer_upto16:layer", "layer_upto512:layer"):
        planted.plant(f"vllm_gptoss.engine.model.{where}", monkeypatch.setattr)
    with pytest.raises(SystemExit, match=planted.MESSAGE):
        serve("auto", tokens)


def test_a_weight_that_moved_on_one_rank_disables_the_layers_on_all(
    vllm_model: None, monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture
) -> None:
    answers = iter([True, True, False])  # at the start, once prepared, at the second step
    monkeypatch.setattr(fallback.worker, "all_ranks", lambda yes: yes and next(answers))
    assert serve("auto") == ["ours", "upstream"]
    assert lines(said) == ["layers: upstream from here on (another rank stepped aside)"]


def test_what_is_meant_to_end_the_start_does() -> None:
    with pytest.raises(RuntimeError, match=planted.MESSAGE):
        fallback.attempt("checkpoint check", "auto", planted.fail, meant=(RuntimeError,))


def test_what_ends_the_process_is_not_caught() -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fallback.attempt("layers", "auto", stop)
