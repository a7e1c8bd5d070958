"""A file of recipes is read whole, or refused with the file, the line and the field."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vllm_gptoss.cli.recipes import load
from vllm_gptoss.cli.recipes.load import RecipeError
from vllm_gptoss.cli.recipes.schema import Family

GOOD = """\
family: Hopper
recipes:
  - goal: latency
    models: [20b]
    devices: [H100]
    config: {max-num-seqs: 4}
    expects: {attention: FLASH_ATTN, experts: gptoss, layers: gptoss}
"""


def written(folder: Path, text: str | bytes) -> Path:
    path = folder / "made_up.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_a_good_file_is_read(tmp_path: Path) -> None:
    (recipe,) = load.load(written(tmp_path, GOOD))
    assert recipe.id == "20b-h100-latency"
    assert recipe.config == {"model": "openai/gpt-oss-20b", "max-num-seqs": 4}
    assert recipe.place == "made_up.yaml:3"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("goal: latency", "goal: speed", r"made_up.yaml:3: recipes.0.goal: .*'latency'.*got 'speed'"),
        ("    models", "    modles", r"made_up.yaml:4: recipes.0.modles: Extra inputs are not permitted"),
        ("[20b]", "[]", r"made_up.yaml:4: recipes.0.models: "),
        ("[H100]", "[H1OO]", r"made_up.yaml:5: recipes.0.devices: no device is called 'H1OO'.*H100"),
        ("[H100]", "[2xh100]", r"made_up.yaml:5: recipes.0.devices: write '2xH100'"),
        ("max-num-seqs: 4", "max_num_seqs: 4", r"made_up.yaml:6: recipes.0.config: 'max_num_seqs': keys are flags"),
        ("max-num-seqs: 4", "max-num-seqs: null", r"made_up.yaml:6: recipes.0.config: .*leave the key out"),
        ("max-num-seqs: 4", "enable-prefix-caching: false", r"made_up.yaml:6: .*write no-enable-prefix-caching: true"),
        ("max-num-seqs: 4", "model: x", r"made_up.yaml:6: recipes.0.config: 'model'"),
        ("layers: gptoss", "layers: fast", r"made_up.yaml:7: recipes.0.expects.layers: "),
        ("family: Hopper", "family: Hoppper", r"made_up.yaml:1: family: there is no 'Hoppper', only Hopper"),
        ("[H100]", "[H100, H100]", r"made_up.yaml:5: recipes.0.devices: H100 is there twice"),
        ("[20b]", "&a [20b]\n    note: *a", r"made_up.yaml:5: aliases \(\*a\) are not allowed"),
        ("goal: latency", "goal: latency\n    goal: agent", r"made_up.yaml:4: goal: the key is there twice"),
        (
            "goal: latency",
            "goal: latency\n    ? [a]\n    : b",
            r"made_up.yaml:4: a key is a list or a mapping, not a word",
        ),
        ("goal: latency", "goal: [", r"made_up.yaml:\d+: no YAML"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(tmp_path: Path, old: str, new: str, said: str) -> None:
    assert old in GOOD
    with pytest.raises(RecipeError, match=said):
        load.load(written(tmp_path, GOOD.replace(old, new)))


def test_all_errors_are_said_at_once(tmp_path: Path) -> None:
    text = GOOD.replace("goal: latency", "goal: speed").replace("layers: gptoss", "layers: fast")
    with pytest.raises(RecipeError) as raised:
        load.load(written(tmp_path, text))
    assert len(str(raised.value).splitlines()) == 2


def test_one_id_twice_names_both_places(tmp_path: Path) -> None:
    entry = GOOD.partition("recipes:\n")[2]
    with pytest.raises(RecipeError, match=r"20b-h100-latency is at made_up.yaml:3 and at made_up.yaml:8: .*variant"):
        load.load(written(tmp_path, GOOD + entry))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "empty"),
        (b"- 1\n", "Input should be"),
        (b"\xff\xfe\x00", "no YAML"),
        (b"a: 1\n" * 100_000, "larger than 256 kB"),
        (b"[" * 5000, "no YAML"),
        (b"a: !!python/object/apply:os.system [x]\n", "no YAML"),
    ],
)
def test_hostile_files_are_refused(tmp_path: Path, text: bytes, said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        load.load(written(tmp_path, text))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"nowhere.yaml: No such file"):
        load.load(tmp_path / "nowhere.yaml")


def test_the_schema_in_the_folder_is_the_model() -> None:
    """Else: `vllm-gptoss recipe schema > recipes/schema.json`."""
    assert json.loads((load.FOLDER / "schema.json").read_text()) == Family.model_json_schema()
