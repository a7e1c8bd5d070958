"""Parts of transformers that vLLM uses and that transformers imports lazily; `warm_vllm.py` loads them beforehand."""

import gc
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read once, when huggingface_hub is imported

from transformers import AutoConfig, AutoImageProcessor, AutoProcessor, AutoTokenizer, AutoVideoProcessor

gc.freeze()  # in what is forked from here, no collection looks at all of this again

__all__ = ["AutoConfig", "AutoImageProcessor", "AutoProcessor", "AutoTokenizer", "AutoVideoProcessor"]
