"""`python -m vllm_gptoss.cli`."""

from vllm_gptoss.cli.main import app

app()
