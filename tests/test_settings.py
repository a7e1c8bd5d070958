"""Plugin settings: configuration and environment mean the same, and an error names the mistake."""

from __future__ import annotations

import re

import pytest

from tests.support.places import ROOT
from vllm_gptoss.server.responses.options import ResponsesOptions
from vllm_gptoss.settings import Settings, SettingsError


def test_defaults_leave_every_decision_to_the_tables() -> None:
    settings = Settings.load(environ={})
    assert (settings.experts, settings.layers, settings.endpoint) == ("auto", "auto", True)


def test_the_config_wins_over_the_environment() -> None:
    environ = {"GPTOSS_EXPERTS": "marlin", "GPTOSS_ENDPOINT": "0"}
    settings = Settings.load({"gptoss": {"experts": "triton"}}, environ)
    assert settings.experts == "triton"
    assert settings.endpoint is False


def test_the_config_of_others_is_left_alone() -> None:
    assert Settings.load({"someone_else": {"experts": 3}}, {}).experts == "auto"
    assert Settings.load(None, {}) == Settings.load({}, {})


@pytest.mark.parametrize(
    ("config", "environ", "message"),
    [
        ({"gptoss": {"expert": "triton"}}, {}, r"unknown gptoss setting 'expert'; there are .*experts"),
        ({"gptoss": {"experts": "fast"}}, {}, r"GPTOSS_EXPERTS.*triton.*got 'fast'"),
        ({}, {"GPTOSS_EXPERTS": "fast"}, r"GPTOSS_EXPERTS.*got 'fast'"),
        ({"gptoss": 3}, {}, "must be an object"),
        ({}, {"GPTOSS_PARSER": "perhaps"}, "GPTOSS_PARSER"),
    ],
)
def test_a_mistake_is_named(config: object, environ: dict[str, str], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        Settings.load(config, environ)


def test_the_document_lists_every_setting_and_variable() -> None:
    document, responses = ((ROOT / "docs" / name).read_text() for name in ("settings.md", "responses.md"))
    rows = [f"| `{name}` | `GPTOSS_{name.upper()}` |" for name in Settings.model_fields]
    sources = [path.read_text() for path in (ROOT / "vllm_gptoss").rglob("*.py")]
    named = {name for source in sources for name in re.findall(r'"(GPTOSS(?:_[A-Z]+)+)"', source)}
    variables = {name for name in named if not name.startswith("GPTOSS_BENCH_")}  # `bench host` sets them itself
    assert [row for row in rows if row not in document] == []
    assert {name for name in variables | {"GPTOSS"} if f"`{name}`" not in document} == set()
    table = re.findall(r"^\| `GPTOSS_RESPONSES_(.*?) \| (.*?) \|", responses, re.MULTILINE)
    pairs = [zip(re.findall("([A-Z][A-Z_]*)`", names), values.split(", "), strict=True) for names, values in table]
    shown = {name.lower(): value for pair in pairs for name, value in pair}
    options = {name: field.default for name, field in ResponsesOptions.model_fields.items()}
    assert shown.keys() == options.keys() - Settings.model_fields.keys()
    for name, value in shown.items():
        if number := re.fullmatch(r"(\d+)( MiB| GiB|)", value):
            assert int(number[1]) * {"": 1, " MiB": 1 << 20, " GiB": 1 << 30}[number[2]] == options[name], name


def listed(document: str) -> list[tuple[list[str], str]]:
    """(names, default) of each table row with a setting or variable."""
    rows = [row.strip("|").split("|") for row in re.findall(r"^\| `.*\|$", document, re.MULTILINE)]
    return [(re.findall(r"`[^`]+`", " ".join(row[:-2])), row[-2].strip()) for row in rows]


def test_the_chinese_document_lists_the_same_settings_and_defaults() -> None:
    english, chinese = ((ROOT / "docs" / name).read_text() for name in ("settings.md", "zh/settings.md"))
    assert len(listed(english)) > len(Settings.model_fields)
    assert listed(english) == [(names, default.replace("无", "none")) for names, default in listed(chinese)]
    assert set(re.findall(r"`[^`]+`", " ".join(english.split()))) == set(
        re.findall(r"`[^`]+`", " ".join(chinese.split()))
    )
