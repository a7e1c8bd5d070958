"""The `vllm-gptoss` command. Nothing else of the package imports it."""
