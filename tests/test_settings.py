"""Plugin settings: two ways in, one meaning, and a mistake is named."""

from __future__ import annotations

import pytest

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
