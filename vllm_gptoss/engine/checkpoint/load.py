"""Wire the checks into vLLM's loading: one object per model, wrapped around what `load_weights` gets.

Every loader that reads a checkpoint (safetensors in all its strategies, fastsafetensors, runai streamer, tensorizer)
calls `model.load_weights(iterator)` once at start-up, so that is where to look. Dummy loading never calls it; sharded
state and LoRA do not come this way; weight updates from a trainer come later, in parts, and are checked one by one.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from vllm_gptoss import fallback
from vllm_gptoss.engine.checkpoint.check import CheckpointError, T, Tables, check, checked
from vllm_gptoss.engine.checkpoint.config import Config

logger = logging.getLogger(__name__)

PARTIAL_FORMATS = frozenset({"dummy"})
"""Load formats under which the first `load_weights` is already an update from outside."""

REWRITING_FORMATS = frozenset({"bitsandbytes", "gguf"})
"""Load formats that generate tensors instead of reading the checkpoint."""

PER_EXPERT = re.compile(r"\.experts\.\d+\..*\.weight$")
"""What vLLM's expert-parallel weight filter leaves out (`ep_weight_filter.should_skip_weight`)."""


class LoadCheck:
    """Checks the weights of one model: completely the first time, tensor by tensor afterwards.

    vllm_config: vLLM's VllmConfig, of which `model_config`, `load_config` and `parallel_config` are read.
    """

    def __init__(self, vllm_config: Any) -> None:
        model, load = vllm_config.model_config, vllm_config.load_config
        self.config = Config.from_json(model.hf_config.to_dict())
        self.model = str(model.model)
        self.revision: str | None = model.revision
        self.download_dir: str | None = load.download_dir
        self.load_format = str(getattr(load.load_format, "value", load.load_format))
        self.filtered = bool(getattr(vllm_config.parallel_config, "enable_ep_weight_filter", False))
        self.complete = self.load_format not in PARTIAL_FORMATS

    def __call__(self, weights: Iterable[tuple[str, T]]) -> Iterator[tuple[str, T]]:
        """The same weights, checked.

        Raises:
            CheckpointError: while being read; see `checked`. A file that cannot be read is explained by its header.
        """
        complete, self.complete = self.complete, False
        if self.load_format in REWRITING_FORMATS:
            logger.info("weights not checked: load format %s rewrites them", self.load_format)
            yield from weights
            return
        if complete:
            weights = self._explained(weights)
        ignore = [n for t in Tables(self.config).tables for n in t if PER_EXPERT.search(n)] if self.filtered else []
        yield from checked(weights, self.config, source=self.model, complete=complete, ignore_missing=ignore)

    def _explained(self, weights: Iterable[tuple[str, T]]) -> Iterator[tuple[str, T]]:
        """Check the headers once the loader has its files, which for a hub id is when the first tensor comes."""
        iterator = iter(weights)
        first = True
        while True:
            try:
                item = next(iterator)
            except StopIteration:
                return
            except Exception:
                self._check_headers()  # names the tensor and file, where the loader often names neither
                raise
            if first:
                self._check_headers()
                first = False
            yield item

    def _check_headers(self) -> None:
        fallback.attempt("checkpoint check", "auto", self._check_files, meant=(CheckpointError,))

    def _check_files(self) -> None:
        directory = local_directory(self.model, self.revision, self.download_dir)
        if directory is None:
            logger.info("headers of %s not checked: no local copy with safetensors files", self.model)
            return
        check(directory, self.config)


def local_directory(model: str, revision: str | None = None, download_dir: str | None = None) -> Path | None:
    """Where the model's safetensors files lie on this machine: itself, or its snapshot in the hub's cache.

    Never touches the network. None for a hub model that is not downloaded, an object store, or other formats.
    """
    directory = Path(model)
    if not directory.is_dir():
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        try:
            cached = try_to_load_from_cache(model, "config.json", cache_dir=download_dir, revision=revision)
        except HFValidationError:
            return None
        if not isinstance(cached, str):
            return None
        directory = Path(cached).parent
    return directory if any(directory.glob("*.safetensors")) else None
