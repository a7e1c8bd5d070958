"""A changed vLLM function that the plugin mirrors or relies on is detected at start, before it causes wrong tokens."""

from __future__ import annotations

import ast
import importlib.util
import logging
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.contract.mutation import mutated
from tests.contract.source import ROOT, UNPACKED, Release, releases
from tests.support.vllm_log import heard, lines
from vllm_gptoss import _vllm, fallback, plugin
from vllm_gptoss._vllm import compatibility
from vllm_gptoss._vllm.compatibility import WHOLE, VllmSource, changed, digest

LISTED = compatibility.releases()
TREES = {release.version: release for release in releases()}
INSTALLED = re.sub(r"\+.*", "", _vllm.version() or "")
if "installed" in TREES:
    TREES[INSTALLED] = TREES["installed"]
CASES = [(version, part) for version in LISTED if version in TREES for part in LISTED[version]]
FILES = [(file, part) for part, files in LISTED["0.33.0"].items() for file in files]
EQUAL = {
    (file, part): [name for name, value in LISTED["0.33.0"][part][file].items() if name != WHOLE and value.isalnum()]
    for file, part in FILES
}
"""By file and part, the definitions that must be equal."""
NEEDS_SOURCE = pytest.mark.skipif("0.33.0" not in TREES, reason="run scripts/vllm_source.py")

MISSED_BEFORE = {
    "GPUModelRunner.execute_model", "GPUModelRunner.sample", "SamplingStates.apply_temperature",
    "Sampler._sample_random", "StagedWriteTensor.stage_write", "post_update", "_post_update_kernel",
    "CudaGraphManager.dispatch", "Scheduler._preempt_request", "Scheduler.schedule",
    "EngineCore.step_with_batch_queue", "VllmConfig.max_concurrent_batches", "KVCacheManager.allocate_slots",
    "UvaBuffer.uva", "FusedStagedWriter.apply", "BlockTables.append_block_ids", "AsyncOutput.get_output",
    "BlockPool.get_new_blocks", "prepare_pos_seq_lens", "combine_sampled_and_draft_tokens", "gumbel_sample",
    "Worker.execute_model",
}  # fmt: skip


@pytest.mark.parametrize(("version", "part"), CASES)
def test_digests_are_those_of_the_release(version: str, part: str) -> None:
    """A changed list or digest: `python scripts/vllm_digests.py VERSION --tree TREE`."""
    for file, listed in LISTED[version][part].items():
        content = (TREES[version].root / file).read_bytes()
        source = VllmSource(content)
        assert listed[WHOLE] == digest(content)
        assert [name for name, expected in listed.items() if name != WHOLE and not source.meets(name, expected)] == []


def test_the_installed_release_is_listed() -> None:
    if "installed" not in TREES:
        pytest.skip("vLLM is not installed")
    assert compatibility.why_not("streams") is None


def test_functions_whose_change_went_unnoticed_are_listed() -> None:
    named = {name for listed in LISTED["0.33.0"]["runner"].values() for name in listed}
    assert named >= MISSED_BEFORE


@NEEDS_SOURCE
def test_what_our_classes_override_and_import_is_listed() -> None:
    """Read from our own source: what a new line of `engine/runner/` takes from vLLM must be in the list."""
    listed = {
        f"{file.removesuffix('.py').removesuffix('/__init__').replace('/', '.')}.{name}"
        for file, names in LISTED["0.33.0"]["runner"].items()
        for name in names
    }
    taken = set()
    for path in [
        *(ROOT / "vllm_gptoss" / "engine" / "runner").glob("*.py"),
        ROOT / "vllm_gptoss" / "_vllm" / "runner.py",
    ]:
        tree = ast.parse(path.read_text())
        imports = {
            alias.name: f"{node.module}.{alias.name}"
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm.")
            for alias in node.names
        }
        taken |= {name for name in imports.values() if "platforms" not in name and not name.endswith("models.config")}
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and (
                base := imports.get(ast.unparse(node.bases[0]) if node.bases else "")
            ):
                source = VllmSource(TREES["0.33.0"].module(base.rpartition(".")[0]).read_bytes())  # type: ignore[union-attr]
                own = (f"{base.rpartition('.')[2]}.{each.name}" for each in node.body if hasattr(each, "name"))
                taken |= {f"{base.rpartition('.')[0]}.{name}" for name in own if name in source.nodes}
    assert {name for name in taken - listed if not any(each.startswith(f"{name}.") for each in listed)} == set()


def module(file: str) -> str:
    return file.removesuffix(".py").replace("/", ".")


@NEEDS_SOURCE
@pytest.mark.parametrize(("file", "part"), [case for case, names in EQUAL.items() if names])
def test_each_mutation_is_detected(tmp_path: Path, file: str, part: str) -> None:
    """N of N: every definition of the list, a changed statement in each."""
    listed = EQUAL[file, part]
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_bytes(mutated((UNPACKED / file).read_bytes(), listed))
    found = list(changed({file: LISTED["0.33.0"][part][file]}, tmp_path))
    assert found == [f"{module(file)}:{name}" for name in listed]


MADE_UP = '''
from vllm.a import hash_of, unused
TABLE = {"a": 1}
class Base(Other):
    size: int = 1
    def go(self, x=1):
        """A docstring."""
        if x > 1:  # a comment
            return f"{hash_of(x)!r:>{x}}"
        return None
    @property
    def name(self): return "b"
def free(x): return x
'''
NAMES = ("TABLE", "Base", "Base.go", "Base.name")
SAME = [
    ("# a comment", "# another"),
    ('"""A docstring."""', '"""Another."""\n'),
    ("if x > 1:", "if (x > 1):"),
    ("return x\n", "return x + 1\n"),
    ("unused", "used"),
    ('{"a": 1}', "{\n    'a': 1,\n}"),
]
DIFFERENT = [
    ("x > 1", "x >= 1", "Base.go"),
    ("x=1", "x=2", "Base.go"),
    ("return None", "return", "Base.go"),
    (":>{x}", ":<{x}", "Base.go"),
    ("vllm.a", "vllm.b", "Base.go"),
    ("def go", "async def go", "Base.go"),
    ("    def go", "    @cached\n    def go", "Base.go"),
    ("@property", "@cached_property", "Base.name"),
    ('"b"', '"c"', "Base.name"),
    ("Other", "Another", "Base"),
    ("size: int = 1", "size: int = 2", "Base"),
    ("def free", "    def free(self): ...\ndef free", "Base"),
    ('"a": 1', '"a": 2', "TABLE"),
    ("TABLE", "MOVED", "TABLE"),
]


def differences(tmp_path: Path, old: str, new: str) -> list[str]:
    assert old in MADE_UP
    source = VllmSource(MADE_UP.encode())
    listed = {WHOLE: digest(MADE_UP.encode())} | {name: str(source.digest(name)) for name in NAMES}
    (tmp_path / "a.py").write_text(MADE_UP.replace(old, new))
    return list(changed({"a.py": listed}, tmp_path))


@pytest.mark.parametrize(("old", "new"), SAME)
def test_what_does_not_run_may_change(tmp_path: Path, old: str, new: str) -> None:
    assert differences(tmp_path, old, new) == []


@pytest.mark.parametrize(("old", "new", "name"), DIFFERENT)
def test_what_runs_may_not_change(tmp_path: Path, old: str, new: str, name: str) -> None:
    assert differences(tmp_path, old, new) == [f"a:{name}"]


@pytest.mark.parametrize(
    ("name", "expected", "is_met"),
    [
        ("Base.go", "()", True),
        ("Base.go", "(x)", True),
        ("Base.go", "(x, y)", False),
        ("Base", "(size)", True),
        ("Base", "(sizes)", False),
        ("hash_of", "()", True),
        ("hash_of", "(x)", False),
        ("gone", "()", False),
        ("Base.go", "~ x > 1 ~ return None", True),
        ("Base.go", "~ return None ~ x > 1", False),
        ("gone", "~ x", False),
    ],
)
def test_a_used_definition_needs_its_parameters_or_its_code(name: str, expected: str, is_met: bool) -> None:
    assert VllmSource(MADE_UP.encode()).meets(name, expected) is is_met


@pytest.mark.parametrize("content", [None, b"def go(:", b"\x00"])
def test_a_file_that_cannot_be_read_differs(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "a.py").write_bytes(content)
    assert list(changed({"a.py": {WHOLE: ""}}, tmp_path)) == ["a.py"]


@pytest.fixture
def next_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Release]:
    """vLLM 0.33.1 is installed, with the functions of 0.33.0."""
    if "0.33.0" not in TREES:
        pytest.skip("run scripts/vllm_source.py")
    for file in {file for file, _ in FILES}:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(UNPACKED / file, tmp_path / file)
    place = SimpleNamespace(origin=str(tmp_path / "vllm" / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: place)
    monkeypatch.setattr(_vllm, "version", lambda: "0.33.1")
    monkeypatch.setattr(fallback, "_said", set())
    compatibility.why_not.cache_clear()
    yield Release("0.33.1", tmp_path)
    compatibility.why_not.cache_clear()


def test_known_bytes_are_not_parsed(next_release: Release, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsing all of it takes most of a second, at each start."""
    monkeypatch.setattr(compatibility, "VllmSource", lambda content: pytest.fail("parsed"))
    assert compatibility.why_not("runner") is compatibility.why_not("streams") is None


def edit(release: Release, file: str, old: str, new: str) -> None:
    path = release.root / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


STATES = "vllm/v1/worker/gpu/sample/states.py"
CONFIG = SimpleNamespace(
    parallel_config=SimpleNamespace(world_size=1, data_parallel_size=1, worker_cls="auto"),
    model_config=SimpleNamespace(runner_type="generate"),
    use_v2_model_runner=True,
    additional_config={},
)


@pytest.mark.vllm
@pytest.mark.parametrize("is_changed", [False, True])
def test_a_patch_release_runs_ours_while_its_functions_are_the_same(
    next_release: Release, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_changed: bool
) -> None:
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: True)
    monkeypatch.setattr(_vllm, "skip_processor", lambda config: None)  # its imports need CUDA's packages then
    edit(next_release, STATES, "NO_LOGPROBS = -1", "NO_LOGPROBS = -1  # none")
    if is_changed:
        edit(next_release, STATES, "temp_np == 1.0", "temp_np == 2.0")
    with heard(caplog, logging.WARNING):
        for _ in range(2):
            assert plugin._wants_runner(CONFIG) is not is_changed
    name = "vllm.v1.worker.gpu.sample.states:SamplingStates.apply_temperature"
    said = [f"host: upstream from here on (vLLM 0.33.1 differs from 0.33.0 in {name})"]
    assert lines(caplog) == (said if is_changed else [])
