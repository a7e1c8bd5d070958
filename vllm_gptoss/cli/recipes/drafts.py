"""When drafts pay, by `drafts.json`, which `benchmarks/tables.py` writes from result files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from vllm_gptoss.cli.recipes.deployment import gpus, section, size
from vllm_gptoss.cli.recipes.load import FOLDER
from vllm_gptoss.cli.recipes.schema import SPECS
from vllm_gptoss.engine.choose import devices
from vllm_gptoss.engine.choose.device import Device
from vllm_gptoss.engine.spec import ModelSpec


def measured() -> list[dict[str, Any]]:
    """A row for each model, device, number of GPUs, of requests and of EAGLE3 drafts. break_even: tokens per step."""
    return list(json.loads((FOLDER / "drafts.json").read_text()))


def advice(
    spec: ModelSpec, device: Device, config: Mapping[str, Any], users: int = 0, accepted: float | None = None
) -> list[str]:
    """A line for each measured number of requests; with `users`, for the nearest on both sides. Empty where nothing
    was measured, and the configuration has no drafts. accepted: tokens per step that the user's drafts reach."""
    draft, model = section(config, "speculative-config"), devices.of(device)
    same = [
        row
        for row in measured()
        if (SPECS[row["model"]], row["device"]) == (spec, model and model.name)
        and row["gpus"] == gpus(config) == size(config, "tensor-parallel-size")
        and (draft.get("method", "eagle3"), config.get("kv-cache-dtype", "auto")) == ("eagle3", "auto")
        and draft.get("num_speculative_tokens", row["drafts"]) == row["drafts"]
    ]
    found = []
    for row in same:
        sizes = [other["requests"] for other in same if other["drafts"] == row["drafts"]]
        lower, upper = [each for each in sizes if each <= users], [each for each in sizes if each >= users]
        if not users or (lower and upper and row["requests"] in (max(lower), min(upper))):
            found.append(_line(row, accepted))
    if found or not (draft or accepted):
        return found
    at = f" with {users} at once" if users else ""
    return [f"not measured for {spec.name} on {devices.label(device)}{at}: docs/guide.md shows how to measure"]


def _line(row: Mapping[str, Any], accepted: float | None) -> str:
    text = f"{row['drafts']} pay above {row['break_even']:.2f} tokens per step with {row['requests']} at once"
    if accepted is None:
        return text
    gain = round(accepted, 2) / row["break_even"]
    verdict = "pay" if gain > 1 else "do not pay" if gain < 1 else "change nothing"
    return f"{text}; {accepted:.2f} {verdict}: {gain:.2f} times the speed"
