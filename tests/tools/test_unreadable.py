"""Parts of a tool's result that gpt-oss cannot read are replaced by a description, on every API."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_gptoss.tools.unreadable import MAX_FACT, describe

PNG = "iVBORw0KGgo="


@pytest.mark.parametrize(
    ("part", "facts"),
    [
        ({"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}}, "image, image/png, 8 bytes"),
        ({"type": "image_url", "image_url": {"url": "https://a.example/b.png"}}, "image, https://a.example/b.png"),
        ({"type": "input_image", "image_url": f"data:image/png;base64,{PNG}"}, "image, image/png, 8 bytes"),
        ({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}, "audio, wav, 3 bytes"),
        ({"type": "file", "file": {"file_data": "AAA=", "filename": "a.pdf"}}, "file, 2 bytes, a.pdf"),
        (
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}},
            "image, image/png, 8 bytes",
        ),
        ({"type": "image", "mimeType": "image/gif", "data": ""}, "image, image/gif"),
        ({"type": "document", "title": "a\n# b", "source": {"type": "file"}}, "document, a # b"),
        ({"type": "hologram", "url": 3}, "content of type hologram"),
        ({}, "content of type None"),
    ],
)
def test_kind_type_size_and_name_are_said(part: dict[str, Any], facts: str) -> None:
    assert describe(part) == f"[{facts}: not shown, because this model reads text only]"


def test_a_description_is_bounded() -> None:
    part = {"type": "x" * 10_000, "format": "y" * 10_000, "name": "z" * 10_000, "url": "http://" + "u" * 10_000}
    assert len(describe(part)) < 5 * MAX_FACT
