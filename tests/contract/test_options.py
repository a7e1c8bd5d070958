"""docs/options.md has every field of every API that vLLM or an SDK has, as the code treats it."""

from __future__ import annotations

import ast
import re

import pytest

from tests.contract.source import ROOT, Release, top_level
from vllm_gptoss.server.chat import chat_options
from vllm_gptoss.server.responses.request import create

pytestmark = pytest.mark.vllm

ENTRY = "vllm.entrypoints"
MODELS = {
    "/v1/chat/completions": (
        (f"{ENTRY}.openai.chat_completion.protocol", "ChatCompletionRequest"),
        (f"{ENTRY}.openai.chat_completion.protocol", "BatchChatCompletionRequest"),
    ),
    "/v1/completions": ((f"{ENTRY}.openai.completion.protocol", "CompletionRequest"),),
    "/v1/messages": ((f"{ENTRY}.anthropic.protocol", "AnthropicMessagesRequest"),),
    "/v1/responses": ((f"{ENTRY}.openai.responses.protocol", "ResponsesRequest"),),
}
Rows = dict[str, tuple[set[str], set[str], set[str]]]


@pytest.fixture(scope="module")
def rows() -> Rows:
    """By path: the fields that are honoured, refused and ignored."""
    found: Rows = {}
    for line in (ROOT / "docs" / "options.md").read_text().splitlines():
        cells = [set(re.findall(r"`([^`]+)`", cell)) for cell in line.split("|")[1:-1]]
        for path in re.findall(r"`POST (/\S+)`", line):
            known = found.get(path, (set(), set(), set()))
            assert sum(map(len, (*known, *cells[1:]))) == len(set().union(*known, *cells[1:])), path
            honoured, refused, ignored = (old | new for old, new in zip(known, cells[1:], strict=True))
            found[path] = (honoured, refused, ignored)
    return found


def fields(release: Release, module: str, name: str) -> set[str]:
    path = release.module(module)
    assert path is not None, module
    model = top_level(path)[name]
    assert isinstance(model, ast.ClassDef)
    named = [
        node.target.id for node in model.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    ]
    return {field for field in named if not field.startswith("_")}


@pytest.mark.parametrize("path", MODELS)
def test_every_field_of_vllms_models_is_in_the_table(rows: Rows, release: Release, path: str) -> None:
    known = set().union(*rows[path])
    for module, name in MODELS[path]:
        assert fields(release, module, name) - known == set(), name


def test_every_field_of_the_sdks_is_in_the_table(rows: Rows) -> None:
    from anthropic.types.message_create_params import MessageCreateParamsBase
    from openai.types.chat.completion_create_params import CompletionCreateParamsBase
    from openai.types.responses.response_create_params import ResponseCreateParamsBase

    for path, model in (
        ("/v1/chat/completions", CompletionCreateParamsBase),
        ("/v1/messages", MessageCreateParamsBase),
        ("/v1/responses", ResponseCreateParamsBase),
    ):
        assert set(model.__annotations__) - set().union(*rows[path]) == set(), path


def test_what_the_table_refuses_is_what_the_code_refuses(rows: Rows) -> None:
    assert rows["/v1/chat/completions"][1] == {*chat_options.REFUSED, "modalities"}
    _, refused, _ = rows["/v1/responses"]
    assert set(create.REFUSED) - refused == {"prompt"}, "refused where the server has no templates"
    assert refused - set(create.REFUSED) == refused - set(create.CreateRequest.model_fields) - set(create.REFUSED)
    assert refused & set(create.CreateRequest.model_fields) <= set(create.REFUSED)
