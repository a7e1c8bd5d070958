"""What float64 says of a token stream: `vllm_gptoss/engine/reference.py`, a layer at a time, on a GPU where there is
one.

Two backends that share a rounding are near to each other whatever it costs; how far each is from this does not depend
on what it shares.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any


def read(
    directory: Path, pieces: Sequence[Sequence[int]], first: int, wanted: Sequence[Collection[int]]
) -> dict[str, Any]:
    """`likely` and `top` of a `numerics.Reading`: float64's log-probabilities of every token from `first` on of every
    piece, given those before it, and of the tokens `wanted` there."""
    import torch

    from vllm_gptoss.engine import reference
    from vllm_gptoss.engine.checkpoint.check import read_config

    device = "cuda" if torch.cuda.is_available() else "cpu"
    likely: list[float] = []
    top: list[dict[int, float]] = []
    with torch.no_grad():
        tensors = reference.read_tensors(directory, device)
        states = reference.hidden_states_of(tensors, read_config(directory), pieces, torch.float64)
        head = tensors["lm_head.weight"].double()
        for tokens, hidden in zip(pieces, states, strict=True):
            logs = torch.log_softmax(reference.linear(hidden[first - 1 : -1], head), -1).cpu()
            for token, row in zip(tokens[first:], logs, strict=True):
                likely.append(float(row[token]))
                top.append({other: float(row[other]) for other in wanted[len(top)]})
    return {"likely": likely, "top": top}
