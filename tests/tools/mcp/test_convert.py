"""Results that do not match their declared type."""

from __future__ import annotations

import mcp_types as types
import pytest

from vllm_gptoss.tools.mcp.convert import to_result
from vllm_gptoss.tools.protocol import Text


@pytest.mark.parametrize("data", ["a", "\x80", "*"])
def test_an_image_that_is_not_base64_is_a_note_between_its_neighbours(data: str) -> None:
    image = types.ImageContent(type="image", data=data, mime_type="image/png")
    around = [types.TextContent(type="text", text=text) for text in ("before", "after")]
    result = to_result(types.CallToolResult(content=[around[0], image, around[1]]), 1000)
    note = Text("[image, image/png: left out, its data is not base64]")
    assert result.content == [Text("before"), note, Text("after")]
