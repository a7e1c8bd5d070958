"""Another model behaves byte for byte as without the plugin, for any `VLLM_PLUGINS`."""

from __future__ import annotations

import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save_file

from demo.server import serve
from tests.support import warm_vllm

pytestmark = [pytest.mark.vllm, pytest.mark.serve, pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
HIDDEN, HEADS, HEAD, INNER = 64, 2, 32, 96
TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}<assistant>"
ARGUMENTS = ("--served-model-name", "llama", "--max-model-len", "512", "--max-num-seqs", "8", "--enforce-eager")

CHAT = {"model": "llama", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 12, "temperature": 0}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
REQUESTS: dict[str, tuple[str, str, dict[str, Any] | None]] = {
    "models": ("GET", "/v1/models", None),
    "openapi": ("GET", "/openapi.json", None),
    "version": ("GET", "/version", None),
    "chat": ("POST", "/v1/chat/completions", CHAT),
    "chat stream": ("POST", "/v1/chat/completions", CHAT | {"stream": True, "stream_options": {"include_usage": True}}),
    "chat logprobs": ("POST", "/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 3}),
    "chat without a parser": ("POST", "/v1/chat/completions", CHAT | {"tools": [TOOL], "tool_choice": "auto"}),
    "chat, bad request": ("POST", "/v1/chat/completions", CHAT | {"temperature": -1}),
    "completions": ("POST", "/v1/completions", {"model": "llama", "prompt": "Hi", "max_tokens": 8, "temperature": 0}),
    "responses": (
        "POST",
        "/v1/responses",
        {"model": "llama", "input": "Hello", "max_output_tokens": 8, "temperature": 0, "store": False},
    ),
    "responses, unknown id": ("GET", "/v1/responses/resp_0", None),
    "tokenize": ("POST", "/tokenize", {"model": "llama", "prompt": "Hello"}),
    "unknown model": ("POST", "/v1/chat/completions", CHAT | {"model": "gpt-oss"}),
}

SETTINGS: dict[str, dict[str, str]] = {"other": {"VLLM_PLUGINS": "other"}, "unset": {}}
"""`other` names a missing plugin, so no part of the plugin loads. Unset, as for a user, every part loads."""


def write_llama(directory: Path) -> Path:
    """A random Llama of one layer with a byte tokenizer and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*alphabet, "<end>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(kind))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HEAD,
        "vocab_size": len(vocabulary),
        "max_position_embeddings": 512,
        "eos_token_id": vocabulary["<end>"],
        "rms_norm_eps": 1e-5,
        "torch_dtype": "bfloat16",
    }
    (directory / "config.json").write_text(json.dumps(config))
    rng = torch.Generator().manual_seed(0)

    def normal(*size: int) -> torch.Tensor:
        return (torch.randn(*size, generator=rng) * size[-1] ** -0.5).bfloat16()

    tensors = {"model.embed_tokens.weight": normal(len(vocabulary), HIDDEN), "lm_head.weight": normal(257, HIDDEN)}
    for part in ("q", "k", "v", "o"):
        tensors[f"model.layers.0.self_attn.{part}_proj.weight"] = normal(HIDDEN, HIDDEN)
    tensors["model.layers.0.mlp.gate_proj.weight"] = normal(INNER, HIDDEN)
    tensors["model.layers.0.mlp.up_proj.weight"] = normal(INNER, HIDDEN)
    tensors["model.layers.0.mlp.down_proj.weight"] = normal(HIDDEN, INNER)
    for norm in ("model.norm", "model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm"):
        tensors[f"{norm}.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
    save_file(tensors, directory / "model.safetensors")
    return directory


def without_ids_and_times(body: str) -> str:
    """Random ids and the clock are all that may differ between two runs of one server."""
    body = re.sub(r"(chatcmpl|cmpl|modelperm|resp|msg|rs|call|chatcmpl-tool)[-_][0-9a-f]{8,}", r"\1-ID", body)
    return re.sub(r'"(created|created_at|completed_at)":\s*\d+(\.\d+)?', r'"\1":0', body)


def with_tokens_joined(stream: str) -> str:
    """Events that only carry on the one before, as one: a busy vLLM sends two tokens at once, the last ones too."""
    said: list[dict[str, Any]] = []
    for line in filter(None, stream.split("\n")):
        event = json.loads(line[6:]) if line.startswith("data: {") else {"line": line}
        if said and _says(event) and _says(said[-1]) and said[-1]["choices"][0]["finish_reason"] is None:
            event["choices"][0]["delta"]["content"] = "".join(
                str(each["choices"][0]["delta"]["content"]) for each in (said.pop(), event)
            )
        said.append(event)
    return "\n".join(event.get("line") or "data: " + json.dumps(event) for event in said)


def _says(event: dict[str, Any]) -> bool:
    return bool(event.get("choices")) and [*event["choices"][0]["delta"]] == ["content"]


def without_paths(log: str) -> str:
    """vLLM logs paths of the environment and of the model; a checkout may be called what is looked for."""
    for place in (ROOT, Path(sys.prefix), Path(tempfile.gettempdir())):
        log = log.replace(str(place), "").replace(str(place.resolve()), "")
    return log


@pytest.fixture(scope="module")
def bodies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """Status, headers and body of every request, by setting."""
    base = tmp_path_factory.mktemp("other")
    (base / "model").mkdir()
    model = write_llama(base / "model")
    out: dict[str, dict[str, str]] = {}
    for name, environment in SETTINGS.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("VLLM_PLUGINS", raising=False)
            log, start = base / f"{name}.log", warm_vllm.popen
            with serve(model, log, (), environment, base_arguments=ARGUMENTS, popen=start) as server:
                out[name] = {label: ask(server.url, *request) for label, request in REQUESTS.items()}
                metrics = httpx.get(f"{server.url}/metrics", timeout=60).text
                out[name]["metrics"] = "\n".join(sorted(set(re.findall(r"^# TYPE (\S+ \S+)", metrics, re.MULTILINE))))
        out[name]["log"] = log.read_text()
    return out


def ask(url: str, method: str, path: str, body: dict[str, Any] | None) -> str:
    answer = httpx.request(method, url + path, json=body, timeout=120)
    headers = {key: value for key, value in answer.headers.items() if key not in ("date", "content-length")}
    streamed = "text/event-stream" in answer.headers.get("content-type", "")
    text = with_tokens_joined(answer.text) if streamed else answer.text
    return without_ids_and_times(f"{answer.status_code} {sorted(headers.items())}\n{text}")


@pytest.mark.parametrize("label", [*REQUESTS, "metrics"])
def test_every_answer_is_the_same(bodies: dict[str, dict[str, str]], label: str) -> None:
    assert bodies["unset"][label] == bodies["other"][label]


def test_streams_are_compared_by_what_they_say() -> None:
    """Two tokens in one event are the same answer; another token, or a lost one, is not."""

    def chunk(content: str, finish: str | None = None) -> str:
        return "data: " + json.dumps({"choices": [{"delta": {"content": content}, "finish_reason": finish}]}) + "\n\n"

    role = 'data: {"choices": [{"delta": {"role": "assistant"}, "finish_reason": null}]}\n\n'
    one = role + chunk("a") + chunk("b") + chunk("c", "stop")
    for two in (role + chunk("ab") + chunk("c", "stop"), role + chunk("a") + chunk("bc", "stop")):
        assert with_tokens_joined(one) == with_tokens_joined(two)
    for other in (role + chunk("a") + chunk("c", "stop"), role + chunk("abc", "length"), chunk("abc", "stop")):
        assert with_tokens_joined(one) != with_tokens_joined(other)


def test_the_requests_were_answered(bodies: dict[str, dict[str, str]]) -> None:
    """Guards the comparison: two equal failures would prove nothing."""
    for label in ("models", "openapi", "chat", "chat stream", "completions", "responses", "tokenize"):
        assert bodies["other"][label].startswith("200 "), bodies["other"][label][:300]
    assert "/v1/responses" in bodies["other"]["openapi"]
    assert "data: [DONE]" in bodies["other"]["chat stream"]


def test_the_plugin_was_there_and_then_not(bodies: dict[str, dict[str, str]]) -> None:
    assert "VLLM_PLUGINS was unset; set to" in bodies["unset"]["log"]
    assert "vllm-gptoss" in without_paths(bodies["unset"]["log"])
    assert "vllm-gptoss" not in without_paths(bodies["other"]["log"])
    assert "is active" not in bodies["unset"]["log"], "no part of the plugin serves another model"
