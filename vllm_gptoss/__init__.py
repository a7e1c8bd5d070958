"""gpt-oss on vLLM: kernels, Harmony, the Responses API and its tools, as a vLLM plugin.

Importing this package imports neither vLLM nor torch: vLLM imports it in every process it starts, also when it
serves another model.
"""

from vllm_gptoss.version import __version__

__all__ = ["__version__"]
