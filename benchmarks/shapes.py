"""gpt-oss shapes by name."""

from __future__ import annotations

import dataclasses

from vllm_gptoss.engine import spec

TINY = spec.ModelSpec("tiny", 2, 128, 128, 8, 4, 16, 2, 64, 201_088)
"""For trying the benchmark itself where there is no GPU."""

SPECS = {"20b": spec.GPT_OSS_20B, "120b": spec.GPT_OSS_120B, "tiny": TINY}


def shape(name: str) -> spec.ModelSpec:
    """The shape called `name`; `20b:2` is two layers of the 20b.

    Raises:
        ValueError: there is no such shape.
    """
    base, _, layers = name.partition(":")
    if base not in SPECS or (layers and not layers.isdigit()):
        raise ValueError(f"no shape {name!r}; there are {', '.join(SPECS)}, and 20b:2 for two layers of one")
    return dataclasses.replace(SPECS[base], layers=int(layers)) if layers else SPECS[base]
