"""gpt-oss on Modal: `modal deploy recipes/deploy/modal_app.py`, then `modal run recipes/deploy/modal_app.py`.

Weights and compiled graphs are in volumes, so that the second start is fast; no container runs while nobody asks.
The flags are those of the recipe `20b-h100-agent`, which a test compares. Needs `pip wheel --no-deps -w dist .` first.
"""

import json
import urllib.request

import modal

RECIPE = "20b-h100-agent"
MODEL = "openai/gpt-oss-20b"
REVISION = "main"
"""Pin a commit of the checkpoint here: what was tested is what is served."""

FLAGS = ["--tool-server", "demo"]
AT_ONCE = 64
"""Requests that one container takes before Modal starts another."""

MINUTE = 60
PORT = 8000

COMPILED = {
    "VLLM_CACHE_ROOT": "/compiled/vllm",
    "TRITON_CACHE_DIR": "/compiled/triton",
    "GPTOSS_CACHE": "/compiled/vllm-gptoss",
}
"""Graphs of torch.compile, kernels of Triton and of the plugin: one volume keeps them all."""

image = (
    modal.Image.from_registry("vllm/vllm-openai:v0.33.0")
    .entrypoint([])
    .add_local_dir("dist", "/wheels", copy=True)
    .run_commands("python3 -m pip install --find-links /wheels 'vllm-gptoss[postgres,python-tool,portable]'")
    .env({"HF_XET_HIGH_PERFORMANCE": "1", **COMPILED})
)
weights = modal.Volume.from_name("gptoss-weights", create_if_missing=True)
compiled = modal.Volume.from_name("gptoss-compiled", create_if_missing=True)
app = modal.App("vllm-gptoss")


def command() -> list[str]:
    """What runs in the container."""
    serve = ["vllm", "serve", MODEL, "--revision", REVISION, "--host", "0.0.0.0", "--port", str(PORT)]
    return [*serve, *FLAGS]


@app.function(
    image=image,
    gpu="H100",
    volumes={"/root/.cache/huggingface": weights, "/compiled": compiled},
    scaledown_window=15 * MINUTE,
    timeout=30 * MINUTE,
)
@modal.concurrent(max_inputs=AT_ONCE)
@modal.web_server(port=PORT, startup_timeout=20 * MINUTE)
def serve() -> None:
    """Starts the server; Modal waits until the port answers. Conversations last as long as their container:
    GPTOSS_STORE with a PostgreSQL URL keeps them."""
    import subprocess

    subprocess.Popen(command())


def asked(url: str, question: str) -> str:
    """One streamed answer with the tools at hand; reasoning and tool calls are printed as they come."""
    python = {"type": "code_interpreter", "container": {"type": "auto"}}
    body = {"model": MODEL, "input": question, "stream": True, "tools": [python]}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/responses", json.dumps(body).encode(), headers)
    answer = ""
    with urllib.request.urlopen(request, timeout=10 * MINUTE) as response:
        for line in response:
            if not line.startswith(b"data: {"):
                continue  # names of events, and [DONE]
            event = json.loads(line[6:])
            if event["type"] in ("response.reasoning_text.delta", "response.code_interpreter_call_code.delta"):
                print(event["delta"], end="", flush=True)
            elif event["type"] == "response.output_text.delta":
                answer += event["delta"]
            elif event["type"] in ("response.failed", "error"):
                raise RuntimeError(f"the server failed: {event}")
    return answer


@app.local_entrypoint()
def main(question: str = "What is 2 ** 100? Use python.") -> None:
    """Wakes a container, waits for its health, and asks."""
    url = serve.get_web_url()
    assert url, "deploy it first: modal deploy recipes/deploy/modal_app.py"
    with urllib.request.urlopen(f"{url}/health", timeout=25 * MINUTE) as response:
        assert response.status == 200, response.status
    print(asked(url, question))
