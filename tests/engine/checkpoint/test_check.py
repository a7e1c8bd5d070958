"""Every way a checkpoint gets damaged must be refused by name, and every good one must pass."""

from __future__ import annotations

import json
import logging
import re
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support import tiny
from vllm_gptoss.engine.checkpoint.check import CheckpointError, check, checked
from vllm_gptoss.engine.checkpoint.config import Config
from vllm_gptoss.engine.checkpoint.headers import INDEX

SINKS = "model.layers.1.self_attn.sinks"
SCALES = "model.layers.0.mlp.experts.gate_up_proj_scales"


@pytest.fixture
def good(tmp_path: Path) -> Path:
    return tiny.write(tmp_path / "model")


def refused(directory: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        check(directory)
    return str(caught.value)


def change(directory: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Rewrite model.safetensors after `edit` changed its tensors in place."""
    file = directory / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    edit(tensors)
    save_file(tensors, file)


def header_of(file: Path) -> tuple[dict[str, dict[str, object]], bytes]:
    raw = file.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def write_raw(file: Path, header: str | bytes, data: bytes) -> None:
    encoded = header.encode() if isinstance(header, str) else header
    file.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)


@pytest.mark.parametrize("fmt", ["mxfp4", "bf16", "quark"])
@pytest.mark.parametrize("shards", [1, 3])
def test_good_checkpoints_pass(tmp_path: Path, fmt: tiny.Format, shards: int) -> None:
    check(tiny.write(tmp_path, fmt=fmt, shards=shards))


def test_names_and_shapes_are_those_of_gpt_oss_20b() -> None:
    """A few entries of openai/gpt-oss-20b's published safetensors headers, and their number: 24 x 19 + 3."""
    from vllm_gptoss.engine.checkpoint.names import expected

    shape = tiny.Shape(24, 2880, 2880, 32, 4, 64, 8, 64, 201_088, 128, 131_072)
    table = expected(Config.from_json(tiny.config(shape)), "mxfp4")
    assert len(table) == 459
    shapes = {name: entry.options[0] for name, entry in table.items()}
    assert shapes["model.layers.23.mlp.experts.gate_up_proj_blocks"] == ((32, 5760, 90, 16), {"U8"})
    assert shapes["model.layers.0.mlp.experts.down_proj_scales"] == ((32, 2880, 90), {"U8"})
    assert shapes["model.layers.0.self_attn.q_proj.weight"][0] == (4096, 2880)
    assert shapes["model.layers.0.self_attn.k_proj.bias"][0] == (512,)
    assert shapes["model.layers.5.self_attn.sinks"][0] == (64,)


# Damaged files


def damaged(folder: Path) -> str:
    message = refused(folder)
    assert "model.safetensors is damaged or truncated" in message
    assert "download it again" in message
    assert "missing" not in message
    return message


@pytest.mark.parametrize("keep", [0, 4, 8, 100, 0.1, 0.5, 0.99])
def test_a_truncated_file(good: Path, keep: float) -> None:
    size = (good / "model.safetensors").stat().st_size
    left = int(size * keep) if 0 < keep < 1 else int(keep)
    with (good / "model.safetensors").open("r+b") as handle:
        handle.truncate(left)
    assert f"({left} bytes;" in damaged(good)


def test_a_git_lfs_pointer_says_what_to_do(good: Path) -> None:
    (good / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    assert "git lfs pull" in refused(good)


@pytest.mark.parametrize(
    "header", ["{not json", "[]", '{"a": 1}', '{"a": {"dtype": "BF16", "shape": "x"}}', '{"a":' + "[" * 200_000]
)
def test_garbage_headers(good: Path, header: str) -> None:
    write_raw(good / "model.safetensors", header, b"")
    damaged(good)


def test_a_header_longer_than_the_format_allows_is_not_read(good: Path) -> None:
    (good / "model.safetensors").write_bytes((1 << 40).to_bytes(8, "little") + b"{}")
    assert "header too large" in damaged(good)


def test_bytes_after_the_last_tensor(good: Path) -> None:
    with (good / "model.safetensors").open("ab") as handle:
        handle.write(b"\0" * 7)
    damaged(good)


def test_a_tensor_twice_in_one_header(good: Path) -> None:
    file = good / "model.safetensors"
    header, data = header_of(file)
    begin, end = header[SINKS]["data_offsets"]  # type: ignore[misc]
    other = header[SINKS] | {"data_offsets": [begin + 2, end + 2]}  # type: ignore[has-type]
    write_raw(file, json.dumps(header)[:-1] + f', "{SINKS}": {json.dumps(other)}}}', data)
    damaged(good)


@pytest.mark.parametrize("shift", [-2, 2])
def test_overlaps_and_holes(good: Path, shift: int) -> None:
    file = good / "model.safetensors"
    header, data = header_of(file)
    begin, end = header[SINKS]["data_offsets"]  # type: ignore[misc]
    header[SINKS]["data_offsets"] = [begin + shift, end + shift]  # type: ignore[has-type]
    write_raw(file, json.dumps(header), data)
    assert "invalid offset" in damaged(good)


def test_offsets_that_disagree_with_the_shape(good: Path) -> None:
    file = good / "model.safetensors"
    header, data = header_of(file)
    header[SINKS]["shape"] = [5]
    write_raw(file, json.dumps(header), data)
    assert "invalid shape" in damaged(good)


def test_no_weights_at_all(good: Path) -> None:
    (good / "model.safetensors").unlink()
    assert "no *.safetensors file" in refused(good)


# Sharded checkpoints


def test_a_missing_shard_is_named_with_what_it_held(tmp_path: Path) -> None:
    tiny.write(tmp_path, shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    message = refused(tmp_path)
    held = sorted(k for k, v in json.loads((tmp_path / INDEX).read_text())["weight_map"].items() if "00002" in v)
    assert f"model-00002-of-00003.safetensors is not there; {INDEX} says it holds {len(held)} tensors" in message
    assert held[0] in message


def test_a_tensor_in_two_shards(tmp_path: Path) -> None:
    tiny.write(tmp_path, shards=2)
    index = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    name = next(k for k, v in index.items() if "00001" in v)
    other = tmp_path / "model-00002-of-00002.safetensors"
    tensors = load_file(other)
    save_file(tensors | {name: load_file(tmp_path / index[name])[name]}, other)
    assert f"{name}: in both model-00001-of-00002" in refused(tmp_path)


def test_a_leftover_file_that_the_index_does_not_name_is_not_read(tmp_path: Path) -> None:
    """vLLM reads only the files in the index, for repositories with shards and a consolidated copy."""
    tiny.write(tmp_path, shards=2)
    (tmp_path / "consolidated.safetensors").write_bytes(b"anything")
    check(tmp_path)


def test_an_index_that_is_not_json(tmp_path: Path) -> None:
    tiny.write(tmp_path, shards=2)
    (tmp_path / INDEX).write_text("{")
    assert INDEX in refused(tmp_path)


# Tensors


ALL_NAMES = sorted(tiny.tensors(tiny.Shape(layers=1)))


@pytest.mark.parametrize("name", ALL_NAMES)
def test_each_tensor_missing_renamed_too_short_along_each_axis_or_of_another_dtype(tmp_path: Path, name: str) -> None:
    tiny.write(tmp_path, layers=1)
    whole = tiny.tensors(tiny.Shape(layers=1))[name]
    for axis in range(whole.ndim):
        change(tmp_path, lambda t, axis=axis: t.update({name: whole.narrow(axis, 1, whole.shape[axis] - 1).clone()}))
        assert f"{name}: is [" in refused(tmp_path)
    other = torch.int8 if whole.dtype == torch.uint8 else torch.float64
    change(tmp_path, lambda t: t.update({name: whole.to(other)}))
    assert re.search(rf"{re.escape(name)}: is .* (I8|F64) in .*expected .* (U8|BF16)", refused(tmp_path))
    renamed = name.replace("weight", "wieght") if "weight" in name else name + "x"
    change(tmp_path, lambda t: t.update({renamed: t.pop(name)}))
    assert f"{renamed} is there and unknown, renamed?" in refused(tmp_path)
    change(tmp_path, lambda t: t.pop(renamed))
    assert f"{name}: missing, expected [" in refused(tmp_path)


def test_unused_tensors_are_a_warning_not_an_error(good: Path, caplog: pytest.LogCaptureFixture) -> None:
    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.self_attn.k_proj.k_scale"] = torch.ones(1)
        tensors["model.extra_head.weight"] = torch.ones(2)

    change(good, add)
    with caplog.at_level(logging.WARNING):
        check(good)
    assert "1 tensors that gpt-oss does not use, such as model.extra_head.weight" in caplog.text


def test_an_unknown_quantisation_is_skipped_with_a_reason(good: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = json.loads((good / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "compressed-tensors"}
    (good / "config.json").write_text(json.dumps(config))
    with caplog.at_level(logging.INFO):
        check(good)
    assert "not checked: format 'compressed-tensors'" in caplog.text


# Quark


def test_quark_may_hold_fp8_and_scales(tmp_path: Path) -> None:
    tiny.write(tmp_path, fmt="quark")

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        for name in [n for n in tensors if n.endswith("_proj.weight") and "self_attn" in n]:
            tensors[name] = tensors[name].to(torch.float8_e4m3fn)
            tensors[name + "_scale"] = torch.ones(1)
        tensors["model.layers.0.self_attn.k_proj.output_scale"] = torch.ones(1)
        tensors["model.layers.0.mlp.experts.0.gate_up_proj.input_scale"] = torch.ones(1)

    change(tmp_path, edit)
    check(tmp_path)


def test_quark_with_one_expert_missing(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.experts.3.down_proj.weight_scale"
    tiny.write(tmp_path, fmt="quark")
    change(tmp_path, lambda t: t.pop(name))
    assert f"{name}: missing, expected [64, 2] U8" in refused(tmp_path)


def test_quark_with_openai_names(tmp_path: Path) -> None:
    tiny.write(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(tiny.config(tiny.Shape(), "quark")))
    check(tmp_path)


# Streams


def stream(**changes: torch.Tensor | None) -> list[tuple[str, torch.Tensor]]:
    tensors = tiny.tensors(tiny.Shape()) | changes
    return [(name, tensor) for name, tensor in tensors.items() if tensor is not None]


CONFIG = Config.from_json(tiny.config(tiny.Shape()))


def test_a_good_stream_passes_unchanged() -> None:
    weights = stream()
    assert [id(t) for _, t in checked(weights, CONFIG)] == [id(t) for _, t in weights]


def test_a_wrong_tensor_is_refused_before_it_is_handed_on() -> None:
    passed: dict[str, torch.Tensor] = {}
    weights = checked(stream(**{SCALES: torch.zeros(4, 128, 1, dtype=torch.uint8)}), CONFIG)
    with pytest.raises(CheckpointError, match=rf"{SCALES}: is \[4, 128, 1\] U8, expected \[4, 128, 2\]"):
        passed.update(weights)
    assert SCALES not in passed


def test_a_missing_tensor_is_noticed_at_the_end() -> None:
    with pytest.raises(CheckpointError, match=rf"{SINKS}: missing, expected \[4\]"):
        list(checked(stream(**{SINKS: None}), CONFIG, source="here"))


def test_a_tensor_sent_twice() -> None:
    weights = stream()
    with pytest.raises(CheckpointError, match="sent twice"):
        list(checked([*weights, weights[3]], CONFIG))


def test_updates_in_parts_are_only_checked_one_by_one() -> None:
    part = stream()[3:5]
    assert len(list(checked([*part, part[0]], CONFIG, complete=False))) == 3
    with pytest.raises(CheckpointError, match="expected"):
        list(checked([(SINKS, torch.zeros(3))], CONFIG, complete=False))
