"""The number of tool errors for the page is limited, per API key and in total."""

from __future__ import annotations

from vllm_gptoss.server.responses.run.context import LAST, TENANTS, ToolErrors
from vllm_gptoss.tools.protocol import ToolError


def test_the_last_errors_of_the_last_keys_are_kept() -> None:
    errors = ToolErrors()
    for number in range(LAST + 1):
        errors.add("noisy", "python", ToolError("timeout", str(number)))
    assert [each["message"] for each in errors.of("noisy")] == [str(number) for number in range(1, LAST + 1)]
    for number in range(TENANTS - 1):
        errors.add(f"key {number}", "python", ToolError("timeout", "slow"))
    assert len(errors.of("noisy")) == LAST
    errors.add("one more", "python", ToolError("timeout", "slow"))
    assert errors.of("noisy") == []
    assert len(errors.of("key 0")) == 1
