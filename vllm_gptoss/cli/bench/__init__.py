"""Benchmarks that also run stock vLLM: `vllm-gptoss bench`."""
