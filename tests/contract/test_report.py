"""A changed vLLM release is reported completely: every lost seam, changed function and new parameter."""

from __future__ import annotations

import os
import shutil
import zipfile
from pathlib import Path

import pytest

from scripts import vllm_source
from tests.contract import report
from tests.contract.mutation import mutated
from tests.contract.source import UNPACKED, Release
from vllm_gptoss._vllm import compatibility

pytestmark = pytest.mark.skipif(not UNPACKED.is_dir(), reason="run scripts/vllm_source.py")
TESTED = Release("0.33.0", UNPACKED)

RENAMED = (
    ("vllm/model_executor/models/registry.py", "register_model"),
    ("vllm/model_executor/layers/quantization/__init__.py", "register_quantization_config"),
    ("vllm/model_executor/utils.py", "replace_parameter"),
    ("vllm/v1/attention/backends/fa_utils.py", "get_flash_attn_version"),
    ("vllm/plugins/endpoint_plugins/interface.py", "attach_router"),
    ("vllm/renderers/online_renderer.py", "_make_request_with_harmony"),
    ("vllm/entrypoints/anthropic/serving.py", "to_chat_completion_request"),
    ("vllm/entrypoints/anthropic/api_router.py", "create_messages"),
    ("vllm/outputs.py", "add"),
    ("vllm/v1/engine/core.py", "_reject_add_in_shutdown"),
)
MIRRORED = (
    ("vllm/model_executor/models/gpt_oss.py", "TransformerBlock.forward"),
    ("vllm/model_executor/layers/quantization/mxfp4.py", "GptOssMxfp4MoEMethod._setup_kernel"),
    ("vllm/v1/attention/backends/flash_attn.py", "FlashAttentionMetadataBuilder.build"),
    ("vllm/v1/worker/gpu/model_runner.py", "GPUModelRunner.execute_model"),
    ("vllm/v1/worker/gpu/sample/states.py", "SamplingStates.apply_temperature"),
    ("vllm/v1/core/sched/scheduler.py", "Scheduler.schedule"),
    ("vllm/parser/harmony.py", "HarmonyParser.parse_delta"),
    ("vllm/parser/harmony.py", "get_harmony_structural_tag"),
    ("vllm/v1/engine/output_processor.py", "OutputProcessor.process_outputs"),
    ("vllm/v1/engine/detokenizer.py", "check_stop_strings"),
)
WIDENED = ("vllm/model_executor/models/gpt_oss.py", "inputs_embeds: torch.Tensor | None = None,", "new_input: int = 0,")


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Release:
    """0.34.0: vLLM 0.33.0 with ten names, ten functions and one signature changed."""
    root = tmp_path_factory.mktemp("trees") / "vllm-0.34.0"
    shutil.copytree(UNPACKED / "vllm", root / "vllm", copy_function=os.link)
    for file, name in RENAMED:
        change(root / file, (UNPACKED / file).read_text().replace(f"def {name}(", f"def {name}_elsewhere("))
    for file, name in MIRRORED:
        change(root / file, mutated((root / file).read_bytes(), [name]).decode())
    file, last, new = WIDENED
    change(root / file, f"{last}\n        {new}".join((root / file).read_text().rsplit(last, 1)))
    return Release("0.34.0", root)


def change(path: Path, text: str) -> None:
    assert text != path.read_text()
    path.unlink()  # the file is a link to the tested release
    path.write_text(text)


def test_every_change_is_named_with_its_difference(release: Release) -> None:
    found = report.changes(release, TESTED)
    lines = [change.line for change in found]
    for _, name in RENAMED:
        assert [line for line in lines if name in line and ("moved: " in line or "lost" in line)], name
    for file, name in MIRRORED:
        (only,) = [change for change in found if change.line == f"changed: {file}:{name}"]
        assert "+    mutated = 1" in only.diff
        assert only.parts
    (wider,) = [change for change in found if "new_input" in change.line and change.line.startswith("parameters: ")]
    assert wider.line.endswith("GptOssForCausalLM.forward gained new_input")
    assert [line for line in lines if line.startswith("override: ") and "does not take new_input" in line]
    assert {part for change in found for part in change.parts} == set(compatibility.PARTS)


def test_the_command_takes_a_folder_and_a_wheel_and_a_tested_release_changes_nothing(
    tmp_path: Path, release: Release, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wheel = tmp_path / "vllm-0.34.0-cp312-abi3-linux_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for file in {file for files in compatibility.releases()["0.33.0"].values() for file in files}:
            archive.write(release.root / file, file)
        archive.write(release.root / "vllm/__init__.py", "vllm/__init__.py")
        archive.writestr("vllm/_C.so", b"binary")
    monkeypatch.setattr(vllm_source, "CACHE", tmp_path / "cache")
    assert report.main([str(wheel), str(UNPACKED)]) == 1
    said = capsys.readouterr().out
    assert "changed: vllm/parser/harmony.py:HarmonyParser.parse_delta" in said
    assert "vLLM vllm-0.33.0 compared with 0.33.0: 0 differences" in said
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == ["vllm-0.34.0"]
    assert not (tmp_path / "cache" / "vllm-0.34.0" / "vllm" / "_C.so").exists()


@pytest.mark.parametrize("content", [None, b"no archive"])
def test_an_unreadable_wheel_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None
) -> None:
    wheel = tmp_path / "vllm-0.34.0-py3-none-any.whl"
    if content is not None:
        wheel.write_bytes(content)
    monkeypatch.setattr(vllm_source, "CACHE", tmp_path / "cache")
    with pytest.raises(vllm_source.SourceError, match="cannot be unpacked"):
        vllm_source.unpacked(str(wheel))
    assert list((tmp_path / "cache").iterdir()) == []
