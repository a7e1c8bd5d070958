"""gpt-oss on Modal: `modal deploy recipes/deploy/modal_app.py`, then `modal run recipes/deploy/modal_app.py`.

Weights and compiled graphs are in volumes, so that the second start is fast; no container runs without requests.
The flags are those of the recipe `20b-h100-agent`, which a test compares. Needs `pip wheel --no-deps -w dist .` first.
"""

import json
import subprocess
import urllib.request

import modal

RECIPE = "20b-h100-agent"
MODEL = "openai/gpt-oss-20b"
REVISION = "main"
"""Pin a commit of the checkpoint here: what was tested is what is served."""

FLAGS = ["--tool-server", "demo"]
AT_ONCE = 64
"""Requests that one container takes before Modal starts another."""

STOP = ["--shutdown-timeout", "20"]
"""Seconds for running requests to end. Modal kills a container 30 seconds after SIGTERM."""
KILL_S = 28

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
    return [*serve, *FLAGS, *STOP]


@app.cls(
    image=image,
    gpu="H100",
    volumes={"/root/.cache/huggingface": weights, "/compiled": compiled},
    scaledown_window=15 * MINUTE,
    timeout=30 * MINUTE,
)
@modal.concurrent(max_inputs=AT_ONCE)
class Server:
    """One container. Conversations last as long as it does: GPTOSS_STORE with a PostgreSQL URL keeps them."""

    @modal.web_server(port=PORT, startup_timeout=20 * MINUTE)
    def serve(self) -> None:
        """Starts the server; Modal waits until the port answers."""
        self.process = subprocess.Popen(command())

    @modal.exit()
    def stop(self) -> None:
        """Stops the server and waits for it, before Modal kills the container."""
        self.process.terminate()
        self.process.wait(KILL_S)


def asked(url: str, question: str) -> str:
    """One streamed answer with tools; reasoning and tool calls are printed as they arrive."""
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
    """Starts a container, waits for its health, and sends a request."""
    url = Server().serve.get_web_url()
    assert url, "deploy it first: modal deploy recipes/deploy/modal_app.py"
    with urllib.request.urlopen(f"{url}/health", timeout=25 * MINUTE) as response:
        assert response.status == 200, response.status
    print(asked(url, question))
