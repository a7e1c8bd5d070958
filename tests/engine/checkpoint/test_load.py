"""The check wrapped around `load_weights`: complete at start-up, piecewise for updates, out of the way otherwise."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support import tiny
from vllm_gptoss.engine.checkpoint.check import CheckpointError
from vllm_gptoss.engine.checkpoint.load import LoadCheck, local_directory

SINKS = "model.layers.1.self_attn.sinks"


def check_of(
    model: Path | str, fmt: tiny.Format = "mxfp4", load_format: str = "auto", ep_filter: bool = False
) -> LoadCheck:
    """A LoadCheck over the fields of VllmConfig that it reads."""
    hf_config = SimpleNamespace(to_dict=lambda: tiny.config(tiny.Shape(), fmt))
    config = SimpleNamespace(
        model_config=SimpleNamespace(hf_config=hf_config, model=str(model), revision=None),
        load_config=SimpleNamespace(load_format=load_format, download_dir=None),
        parallel_config=SimpleNamespace(enable_ep_weight_filter=ep_filter),
    )
    return LoadCheck(config)


def weights(fmt: tiny.Format = "mxfp4", *left_out: str) -> list[tuple[str, torch.Tensor]]:
    return [(name, tensor) for name, tensor in tiny.tensors(tiny.Shape(), fmt).items() if name not in left_out]


def test_the_first_load_must_be_complete_and_later_ones_need_not(tmp_path: Path) -> None:
    check = check_of(tmp_path)
    assert len(list(check(weights()))) == len(weights())
    assert len(list(check(weights()[:2]))) == 2
    with pytest.raises(CheckpointError, match="expected"):
        list(check([(SINKS, torch.zeros(3))]))


def test_a_missing_tensor_at_the_first_load(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"{SINKS}: missing"):
        list(check_of(tmp_path)(weights("mxfp4", SINKS)))


def test_updates_after_dummy_loading_come_in_parts(tmp_path: Path) -> None:
    assert len(list(check_of(tmp_path, load_format="dummy")(weights()[:2]))) == 2


@pytest.mark.parametrize("load_format", ["bitsandbytes", "gguf"])
def test_loaders_that_rewrite_weights_are_left_alone(tmp_path: Path, load_format: str) -> None:
    rewritten = [(SINKS, torch.zeros(9, 9))]
    assert list(check_of(tmp_path, load_format=load_format)(rewritten)) == rewritten


def test_experts_left_out_by_the_expert_parallel_filter_are_not_missed(tmp_path: Path) -> None:
    """vLLM skips the big tensors of experts of other ranks, but never their scales or biases."""
    elsewhere = [n for n, _ in weights("quark") if ".experts.2." in n or ".experts.3." in n]
    skipped = [n for n in elsewhere if n.endswith(".weight")]
    assert list(check_of(tmp_path, "quark", ep_filter=True)(weights("quark", *skipped)))
    with pytest.raises(CheckpointError, match="missing"):
        list(check_of(tmp_path, "quark")(weights("quark", *skipped)))
    with pytest.raises(CheckpointError, match="weight_scale: missing"):
        list(check_of(tmp_path, "quark", ep_filter=True)(weights("quark", *elsewhere)))


def test_a_local_checkpoint_is_checked_before_the_first_tensor_is_handed_on(tmp_path: Path) -> None:
    tiny.write(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    handed: list[Any] = []
    with pytest.raises(CheckpointError, match="model.safetensors is damaged or truncated"):
        handed.extend(check_of(tmp_path)(weights()))
    assert handed == []


def test_a_loader_that_fails_on_a_damaged_file_is_explained(tmp_path: Path) -> None:
    """safetensors' own error names neither file nor tensor."""
    from safetensors import safe_open

    tiny.write(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])

    def loader() -> Any:
        with safe_open(file, "pt") as handle:
            for name in handle.keys():  # noqa: SIM118
                yield name, handle.get_tensor(name)

    with pytest.raises(CheckpointError, match="model.safetensors is damaged or truncated"):
        list(check_of(tmp_path)(loader()))


def test_a_loader_that_fails_on_a_good_file_keeps_its_error(tmp_path: Path) -> None:
    tiny.write(tmp_path)

    def loader() -> Any:
        yield weights()[0]
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError, match="gone"):
        list(check_of(tmp_path)(loader()))


def test_where_the_files_of_a_model_lie(tmp_path: Path) -> None:
    assert local_directory(str(tiny.write(tmp_path / "model"))) == tmp_path / "model"
    (tmp_path / "empty").mkdir()
    assert local_directory(str(tmp_path / "empty")) is None
    assert local_directory("s3://bucket/gpt-oss-20b", download_dir=str(tmp_path)) is None
    assert local_directory("someone/not-downloaded", download_dir=str(tmp_path)) is None


def test_a_downloaded_hub_model_is_found_in_its_cache(tmp_path: Path) -> None:
    """The hub's cache layout: models--<owner>--<name>/{refs/main, snapshots/<commit>}."""
    root = tmp_path / "models--openai--gpt-oss-tiny"
    snapshot = root / "snapshots" / ("0" * 40)
    tiny.write(snapshot)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text("0" * 40)
    assert local_directory("openai/gpt-oss-tiny", download_dir=str(tmp_path)) == snapshot
    file = snapshot / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    check = check_of("openai/gpt-oss-tiny")
    check.download_dir = str(tmp_path)
    with pytest.raises(CheckpointError, match="truncated"):
        list(check(weights()))


def test_config_json_is_not_what_vllm_changed_in_memory() -> None:
    """vLLM renames quant_method to gpt_oss_mxfp4 in its copy of the config; both mean MXFP4."""
    from vllm_gptoss.engine.checkpoint.config import Config
    from vllm_gptoss.engine.checkpoint.names import detect_format

    config = json.loads(json.dumps(tiny.config(tiny.Shape())))
    config["quantization_config"]["quant_method"] = "gpt_oss_mxfp4"
    assert detect_format(Config.from_json(config)) == "mxfp4"
