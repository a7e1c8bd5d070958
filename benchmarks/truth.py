"""Log-probabilities of a token stream in float64, computed by `benchmarks/reference.py` layer by layer.

Two backends that share a rounding error are close to each other; the distance from float64 shows that error.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any


def read(
    directory: Path, pieces: Sequence[Sequence[int]], first: int, wanted: Sequence[Collection[int]]
) -> dict[str, Any]:
    """Log-probabilities in float64 of each piece's tokens from index `first` on, given the tokens before them.

    likely: of each token; top: of the tokens `wanted` at each position. Runs on a GPU if there is one."""
    import torch

    from benchmarks import reference
    from benchmarks.model_config import ModelConfig

    device = "cuda" if torch.cuda.is_available() else "cpu"
    likely: list[float] = []
    top: list[dict[int, float]] = []
    with torch.no_grad():
        tensors = reference.read_tensors(directory, device)
        config = ModelConfig.from_json(json.loads((directory / "config.json").read_text()))
        states = reference.hidden_states_of(tensors, config, pieces, torch.float64)
        head = tensors["lm_head.weight"].double()
        for tokens, hidden in zip(pieces, states, strict=True):
            logs = torch.log_softmax(reference.linear(hidden[first - 1 : -1], head), -1).cpu()
            for token, row in zip(tokens[first:], logs, strict=True):
                likely.append(float(row[token]))
                top.append({other: float(row[other]) for other in wanted[len(top)]})
    return {"likely": likely, "top": top}
