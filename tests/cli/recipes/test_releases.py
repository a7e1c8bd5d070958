"""vLLM 0.32's and 0.33's own parser take every recipe, and what they let through is found. One start of each."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tests.support import warm
from vllm_gptoss.cli.recipes import check, flags, load, probe, render, variables
from vllm_gptoss.cli.recipes.check import Case
from vllm_gptoss.engine.choose import devices
from vllm_gptoss.engine.spec import GPT_OSS_20B

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

UNPACKED = Path(__file__).resolve().parents[3] / ".cache" / "vllm-0.33.0"
RECIPES = load.shipped()
MODEL = {"model": "openai/gpt-oss-20b"}
BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "unknown flag": ({"max-model-length": 1}, "unrecognized arguments: --max-model-length"),
    "full_cuda_graph": ({"compilation-config": {"full_cuda_graph": True}}, "became cudagraph_mode"),
    "mxfp8 as a backend": ({"moe-backend": "flashinfer_trtllm_mxfp8"}, "--additional-config"),
    "no number": ({"max-num-seqs": "many"}, "does not start"),
    "attention backend": ({"attention-backend": "TRITON_ATTN_VLLM_V1"}, "knows no 'TRITON_ATTN_VLLM_V1'"),
    "draft key": ({"speculative-config": {"methud": "eagle3"}}, "did you mean method?"),
    "draft method": ({"speculative-config": {"method": "eagle33"}}, "knows no 'eagle33'"),
    "cache dtype": ({"kv-cache-dtype": "fp9"}, "fp9"),
    "false in a file": ({"enable-prefix-caching": False}, "dropped by --config without a word; write no-enable-"),
    "null in a file": ({"tool-server": None, "max-num-seqs": None}, "does not start"),
}
RESTATED = {"gpu-memory-utilization": 0.92, "max-model-len": 131_072, "max-num-seqs": 1024, "tensor-parallel-size": 1}
WORDS = (
    ["openai/gpt-oss-20b", "-tp", "2", "--attention-backend", "TRITON_ATTN", "-cc.cudagraph_mode", "PIECEWISE"],
    ["openai/gpt-oss-20b", "--disable-prefix-caching"],
)
UNNAMED = ("--reasoning-parser GptOss", "--enable-auto-tool-choice --tool-call-parser gptoss")
"""Names that only vLLM knows."""
REFUSED = (
    *UNNAMED,
    "--dtype float16",
    "--dtype float32",
    "--max-model-len 131073",
    "--max-model-len 262144",
    "--max-model-len 256k",
    "--enable-auto-tool-choice",
    "--chat-template /nowhere/template.jinja",
    "--no-enable-chunked-prefill --max-num-batched-tokens 2048 --max-model-len 4096",
    "-tp 8 -dcp 3",
    "-tp 8 -dcp 2",
    "-tp 3",
    "--enable-log-outputs",
    "--max-num-seqs 512 --max-num-batched-tokens 256",
    "--max-num-seqs 0",
    "-tp 0",
    "--gpu-memory-utilization 0",
    "--gpu-memory-utilization 1.5",
)
ACCEPTED = (
    "",
    "--dtype bfloat16",
    "--max-model-len 131072",
    "--max-model-len auto",
    "--max-model-len 32k",
    '--max-model-len 262144 --hf-overrides {"max_position_embeddings":262144}',
    "--reasoning-parser openai_gptoss",
    "--tool-call-parser gptoss",
    "--enable-auto-tool-choice --tool-call-parser openai",
    "--chat-template {{messages}}",
    "--no-enable-chunked-prefill --max-num-batched-tokens 4096 --max-model-len 4096",
    "-tp 2 --served-model-name a b --enforce-eager -cc.cudagraph_mode PIECEWISE",
    "--enable-log-outputs --enable-log-requests",
    "--kv_cache_dtype=fp8 --cudagraph-capture-sizes 1 2 4 --port 9000",
    '--speculative-config {"method":"eagle3","model":"nvidia/gpt-oss-120b-Eagle3","num_speculative_tokens":3}',
    "--enable-sleep-mode --distributed-executor-backend ray -tp 2",
    "--max-num-seqs 512 --max-num-batched-tokens 512",
    "--gpu-memory-utilization 1.0",
    "--max-cudagraph-capture-size 0",
)
"""Arguments that vLLM's engine refuses and accepts for gpt-oss, which a parser takes all."""
FIRST = len(RECIPES) + len(BROKEN) + 1
"""Of `WORDS`, in what a release answered."""
MORE = ["--port", "9000", "--max-num-seqs", "7"]
"""What a user types after `recipe serve ID --`."""


def releases() -> list[Any]:
    installed = [pytest.param(None, id="installed")]
    return installed + [pytest.param(UNPACKED, id="0.33.0")] * UNPACKED.is_dir()


@pytest.fixture(scope="module", params=releases())
def release(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> probe.Release:
    broken = [{**MODEL, **config} for config, _ in BROKEN.values()]
    folder = tmp_path_factory.mktemp("configs")
    files = [folder / f"{recipe.id}.yaml" for recipe in RECIPES]
    for recipe, file in zip(RECIPES, files, strict=True):
        file.write_text(render.config(recipe))
    served = [["--config", str(file), *MORE] for file in files]
    typed = [[*render.words(recipe)[2:], *MORE] for recipe in RECIPES]
    mine = folder / "mine.yaml"
    mine.write_text("model: openai/gpt-oss-20b\nenable-prefix-caching: false\nheadless: false\nmax-num-seqs: 8\n")
    others = [["--config", str(mine)], ["/local/model", "--config", str(mine), "--max-num-seqs", "9"]]
    questions = [*(recipe.config for recipe in RECIPES), *broken, {**MODEL, **RESTATED}, *WORDS]
    engine = [[MODEL["model"], *line.split()] for line in (*REFUSED, *ACCEPTED)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probe, "subprocess", warm.PROBING)
        return probe.ask([*questions, *served, *typed, *engine, *others], request.param)


@pytest.mark.parametrize("line", [*REFUSED, *ACCEPTED])
def test_the_engines_verdict_and_ours_without_it_agree(release: probe.Release, line: str) -> None:
    parsed = release.parsed[[*REFUSED, *ACCEPTED].index(line) - len(REFUSED) - len(ACCEPTED) - 2]
    read = flags.values([MODEL["model"], *line.split()])
    assert not parsed.error
    assert bool(parsed.refused) == (line in REFUSED), parsed.refused
    device = devices.named("8xH200")
    for values, releases in ((parsed.values, [(release, parsed)]), (read, []))[: 1 if line in UNNAMED else 2]:
        found = [each for each in check.command(check.case_of(values, device, {}), releases) if each.fatal]
        assert bool(found) == (line in REFUSED), found


@pytest.mark.parametrize("line", ACCEPTED)
def test_a_line_is_read_as_vllm_reads_it(release: probe.Release, line: str) -> None:
    theirs = release.parsed[ACCEPTED.index(line) - len(ACCEPTED) - 2].values
    ours = {key: value for key, value in flags.values([MODEL["model"], *line.split()]).items() if key in theirs}
    assert {key: ours.get(key) for key in theirs if flags.COUNTED.fullmatch(key)} == {
        key: value for key, value in theirs.items() if flags.COUNTED.fullmatch(key)
    }


def case(config: dict[str, Any], **env: str) -> Case:
    return Case("here", GPT_OSS_20B, devices.named("H200"), {**MODEL, **config}, env)


def test_every_recipe_starts_and_restates_nothing(release: probe.Release) -> None:
    pairs = zip(RECIPES, release.parsed, strict=False)
    found = [trouble for recipe, parsed in pairs for trouble in check.recipe(recipe, [(release, parsed)])]
    assert not found, "\n".join(map(str, found))


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_found(release: probe.Release, name: str) -> None:
    config, said = BROKEN[name]
    parsed = release.parsed[len(RECIPES) + list(BROKEN).index(name)]
    found = check.command(case(config), [(release, parsed)])
    assert any(said in str(trouble) for trouble in found if trouble.fatal), found


def test_a_restated_default_is_found(release: probe.Release) -> None:
    parsed = release.parsed[len(RECIPES) + len(BROKEN)]
    found = {trouble.what.partition(":")[0] for trouble in check.no_default(case(RESTATED), parsed)}
    assert found == set(RESTATED)


def test_words_are_read_as_vllm_reads_them(release: probe.Release) -> None:
    assert release.parsed[FIRST].values == {
        "model": "openai/gpt-oss-20b",
        "tensor-parallel-size": 2,
        "attention-backend": "TRITON_ATTN",
        "compilation-config": {"cudagraph_mode": "PIECEWISE"},
    }


def test_a_recipes_file_says_what_its_command_says_and_flags_after_it_win(release: probe.Release) -> None:
    """As vLLM's outer parser reads the file of `recipe show --config`, and the flags of `recipe serve ID -- …`."""
    after = release.parsed[FIRST + len(WORDS) :]
    for index, recipe in enumerate(RECIPES):
        served, typed = after[index], after[len(RECIPES) + index]
        assert served == dataclasses.replace(typed, restated=served.restated), recipe.id
        assert not served.error
        assert (served.values["port"], served.values["max-num-seqs"]) == (9000, 7)
        assert served.values["model"] == recipe.repository
        if "no-enable-prefix-caching" in recipe.config:
            assert served.values["enable-prefix-caching"] is False


def test_what_a_file_loses_is_found_and_a_model_before_it_wins(release: probe.Release) -> None:
    mine, other = release.parsed[-2:]
    assert mine.dropped == other.dropped == ("enable-prefix-caching",)  # of `headless` false is the default
    assert mine.values == {"model": "openai/gpt-oss-20b", "max-num-seqs": 8}
    assert other.values == {"model": "/local/model", "max-num-seqs": 9}


def test_a_flag_of_another_release_says_which(release: probe.Release) -> None:
    found = [str(each) for each in check.parses(case({}), release, release.parsed[FIRST + 1])]
    if release.version.startswith("0.32"):
        assert any("--disable-prefix-caching needs vLLM 0.33" in each for each in found)
    else:
        assert not found


def test_new_flags_are_new(release: probe.Release) -> None:
    old = release.version.startswith("0.32")
    assert {flag for flag in flags.NEW_FLAGS if flag in release.flags} == (set() if old else set(flags.NEW_FLAGS))


def test_dead_variables_are_found_and_living_ones_left(release: probe.Release) -> None:
    assert not set(variables.REPLACED) & release.variables
    dead = case({}, VLLM_USE_TRTLLM_ATTENTION="1", PYTHON_EXECUTION_BACKEND="UV", VLLM_ROCM_USE_AITER="1", HOME="/")
    found = [each.what for each in check.dead_variables(dead, release)]
    assert not [each for each in check.dead_variables(dead, release) if "nothing:" in each.remedy]
    assert found == ["nothing reads PYTHON_EXECUTION_BACKEND", "nothing reads VLLM_USE_TRTLLM_ATTENTION"]
