"""The comparison of logits and perplexity: it must pass what differs by rounding, and fail what differs by a fault."""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
from pathlib import Path

import pytest

from benchmarks import checkpoint, numerics, shapes
from benchmarks.numerics import Reading, verdict

POSITIONS, TOKENS = 640, 12
EAGER = {"enforce_eager": True, "kv_cache_memory_bytes": 2**28}


def reading(seed: int, noise: float, shift: float = 0.0) -> Reading:
    """One stream's true log-probabilities with a variant's rounding; `shift` makes every next token less likely."""
    truth, own = random.Random(0), random.Random(seed)
    rows = [[-truth.uniform(0.1, 9) for _ in range(TOKENS)] for _ in range(POSITIONS)]
    top = [{token: value + own.gauss(0, noise) for token, value in enumerate(row)} for row in rows]
    return Reading([found[0] - shift for found in top], top)


STOCK = {"triton": reading(1, 0.01), "marlin": reading(2, 0.01)}


def test_rounding_of_its_own_is_within_the_spread() -> None:
    found = verdict({"plugin": reading(3, 0.01), **STOCK}, "plugin", 1.1)
    assert found["logits_within"]
    assert found["perplexity_within"]
    assert found["ratio"] == pytest.approx(1, abs=0.1)


def test_more_precise_than_stock_is_within() -> None:
    assert verdict({"plugin": reading(3, 0.0), **STOCK}, "plugin", 1.1)["ratio_bound"] < 0.8


@pytest.mark.parametrize("noise", [0.013, 0.02, 0.5])
def test_logits_that_are_off_are_outside(noise: float) -> None:
    assert not verdict({"plugin": reading(3, noise), **STOCK}, "plugin", 1.1)["logits_within"]


def test_a_worse_perplexity_is_found_though_the_logits_are_near() -> None:
    found = verdict({"plugin": reading(3, 0.01, shift=0.01), **STOCK}, "plugin", 1.1)
    assert found["logits_within"]
    assert not found["perplexity_within"]


def test_one_other_backend_is_no_spread() -> None:
    with pytest.raises(ValueError, match="two other variants"):
        verdict({"plugin": reading(3, 0.01), "triton": STOCK["triton"]}, "plugin", 1.1)


def test_variants_carry_engine_arguments() -> None:
    assert numerics._variant("marlin") == ("marlin", "marlin", {})
    assert numerics._variant('b={"variant": "plugin:layers=upstream", "dtype": "bfloat16"}') == (
        "b",
        "plugin:layers=upstream",
        {"dtype": "bfloat16"},
    )


def test_a_rest_of_the_stream_that_is_all_prompt_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "ids.json").write_text(json.dumps(list(range(10))))
    assert numerics._stream(tmp_path / "ids.json", 2048, 3, 4) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert numerics._stream(tmp_path / "ids.json", 2048, 3, 4, prompt=2) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_random_weights_are_the_same_every_time(tmp_path: Path) -> None:
    small = dataclasses.replace(shapes.TINY, vocabulary=64)
    for name in "ab":
        checkpoint.write(small, tmp_path / name)
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


@pytest.mark.usefixtures("warm_engines")
@pytest.mark.slow
@pytest.mark.vllm
def test_real_engines_within_and_outside(tmp_path: Path) -> None:
    """Stock backends differ by rounding: here, by the last bits of a projection. A forgotten bias is a fault."""
    from safetensors.torch import load_file, save_file
    from torch import manual_seed, randn_like, zeros_like

    manual_seed(0)  # an expert near a tie that falls differently for one of the two is most of a distance
    checkpoint.write(dataclasses.replace(shapes.TINY, vocabulary=2048), tmp_path / "plugin")
    for name in ("a", "b", "fault"):
        shutil.copytree(tmp_path / "plugin", tmp_path / name)
        path = tmp_path / name / "model-layer-000.safetensors"
        tensors = load_file(path)
        out = "model.layers.0.self_attn.o_proj"
        if name == "fault":
            tensors[f"{out}.bias"] = zeros_like(tensors[f"{out}.bias"])
        else:
            tensors[f"{out}.weight"] *= 1 + randn_like(tensors[f"{out}.weight"]) * 2**-8
        save_file(tensors, path, metadata={"format": "pt"})
    job = {"chunk": 8, "prompt": 1, "tensor_parallel": 1, "variant": "plugin", "options": EAGER}
    job["stream"] = numerics._stream(None, 2048, 2, 150)
    found = {}
    for name in ("plugin", "a", "b", "fault"):
        one = json.loads(json.dumps(numerics._run({**job, "model": str(tmp_path / name)})))
        top = [{int(token): value for token, value in position.items()} for position in one["top"]]
        found[name] = Reading(one["likely"], top)
        assert one["paths"] == dict.fromkeys(("fused_layers", "one_launch", "many_tokens", "own_experts"), 0)
    fault = found.pop("fault")
    assert len(fault.likely) == 298
    good = verdict(found, "plugin", 1.1)
    assert good["logits_within"], good
    assert good["perplexity_within"], good
    assert 0 < good["ratio"] < 1
    bad = verdict({**found, "plugin": fault}, "plugin", 1.1)
    assert not bad["logits_within"]
    assert bad["ratio"] > 2


def test_what_was_decoded_is_compared_up_to_the_first_difference() -> None:
    found = {
        name: {
            "decoded": [[1, 2, 3], [4, last, 6]],
            "likely": [[0, 1, 2], [3, 4, 5]],
            "top": [["a", "b", "c"], ["d", "e", "f"]],
        }
        for name, last in (("plugin", 5), ("triton", 5), ("marlin", 7))
    }
    assert numerics.cut(found, [[7, 8], [9, 10]], 1) == [[7, 1, 2, 3], [9, 4]]
    assert all(one["likely"] == [0, 1, 2, 3] and one["top"] == ["a", "b", "c", "d"] for one in found.values())


@pytest.mark.usefixtures("warm_engines")
@pytest.mark.slow
@pytest.mark.vllm
def test_plain_decode_of_real_engines_is_compared_with_each_other_and_with_float64(tmp_path: Path) -> None:
    checkpoint.write(dataclasses.replace(shapes.TINY, vocabulary=2048), tmp_path)
    job = {"model": str(tmp_path), "chunk": 1, "prompt": 8, "tensor_parallel": 1}
    job["stream"] = numerics._stream(None, 2048, 2, 40)
    specs = [(name, "plugin", EAGER) for name in ("plugin", "same", "again")]
    found = numerics.compare(job, specs, together=True, exact=True, slack=1.1)
    assert found["positions"] == 2 * 32
    assert found["distances"]["plugin - same"]["mean"] < 1e-3, "the same numbers as seeds"
    assert found["float64"]["within"]
    assert 0 < found["float64"]["means"]["plugin"] < 0.1, "bfloat16 against float64"
    assert found["nll"]["plugin"] == pytest.approx(found["float64"]["nll"], rel=0.01)


def test_farther_from_float64_than_the_others_is_found() -> None:
    exact = reading(0, 0.0)
    near = {"plugin": reading(1, 0.01), "triton": reading(2, 0.01), "marlin": reading(3, 0.01)}
    assert numerics.from_truth(near, exact, "plugin", 1.1)["within"]
    assert not numerics.from_truth({**near, "plugin": reading(1, 0.015)}, exact, "plugin", 1.1)["within"]
