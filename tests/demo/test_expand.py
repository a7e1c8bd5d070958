"""An existing model directory is complete after any interruption."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from demo import expand

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "demo.expand", *arguments], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def test_an_expansion_killed_midway_is_repaired_and_bit_identical(model_dir: Path, tmp_path: Path) -> None:
    target = tmp_path / "model"
    process = run(str(target))
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob(".model.partial-*/model.safetensors")):
        assert process.poll() is None
        assert time.monotonic() < deadline
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert not target.exists()
    assert list(tmp_path.glob(".model.partial-*"))

    out, err = run(str(target)).communicate(timeout=240)
    assert out.decode().strip() == str(target)
    assert b"left by an interrupted run" in err
    assert not list(tmp_path.glob(".model.partial-*"))
    assert (target / expand.SUMS).read_bytes() == (model_dir / expand.SUMS).read_bytes()
    assert expand.damage(target) is None


@pytest.mark.alone
def test_a_second_use_changes_nothing_and_is_quick(model_dir: Path) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in model_dir.iterdir()}
    began = time.process_time()
    assert expand.model_dir(model_dir.parent) == model_dir
    assert {path.name: path.stat().st_mtime_ns for path in model_dir.iterdir()} == before
    # Hashing 90 MB at 0.2 GB/s, the slowest SHA-256 without CPU support, takes 0.5 s; a build takes 4 s.
    assert time.process_time() - began < 3


@pytest.mark.parametrize("harm", ["changed", "missing", "no sums"])
def test_damage_is_seen(model_dir: Path, tmp_path: Path, harm: str) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in model_dir.iterdir():
        if path.stat().st_size > 1_000_000:
            (copy / path.name).symlink_to(path)
        else:
            shutil.copy(path, copy)
    assert expand.damage(copy) is None
    if harm == "changed":
        (copy / "config.json").write_text((copy / "config.json").read_text() + " ")
    elif harm == "missing":
        (copy / "tokenizer_config.json").unlink()
    else:
        (copy / expand.SUMS).write_text("{}")
    assert expand.damage(copy) is not None


def test_a_damaged_model_is_built_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    builds = []

    def quick(folder: Path) -> None:
        builds.append(folder)
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(expand, "write", quick)
    target = expand.expand(tmp_path / "model")
    (target / "config.json").write_text("damaged")
    expand.expand(target)
    assert len(builds) == 2
    assert "config.json changed" in caplog.text
    assert (target / "config.json").read_text() == "{}"
    assert json.loads((target / expand.SUMS).read_text()).keys() == {"config.json"}


def test_a_failed_build_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(expand, "write", full_disk)
    with pytest.raises(OSError, match="No space left"):
        expand.expand(tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == [".model.lock"]


def test_a_folder_with_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="holds something else"):
        expand.expand(tmp_path)
    assert (tmp_path / "precious.txt").read_text() == "mine"


def test_other_weights_get_another_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("weights.safetensors", "checkpoint.py", "expand.py", "tokenizer.py"):
        (tmp_path / name).write_bytes((ROOT / "demo" / name).read_bytes())
    real = expand.key()
    monkeypatch.setattr(expand, "__file__", str(tmp_path / "expand.py"))
    assert expand.key() == real
    (tmp_path / "weights.safetensors").write_bytes(b"other")
    assert expand.key() != real
