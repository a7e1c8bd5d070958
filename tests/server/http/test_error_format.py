"""Errors as clients read them: a key in either header, Anthropic's types, and other APIs' bodies as they were."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from starlette.responses import JSONResponse, StreamingResponse

from vllm_gptoss.server.http.error_format import ErrorFormat, overflow

pytestmark = pytest.mark.vllm

MESSAGE = {"id": "m", "type": "message", "role": "assistant", "content": [], "model": "m", "usage": None}
ASKED: dict[str, Any] = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}


@pytest.fixture
def app() -> FastAPI:
    """Routes that answer with the status in the request's `x-answer`, behind vLLM's authentication."""
    from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

    app = FastAPI()

    @app.post("/v1/messages")
    @app.post("/v1/chat/completions")
    async def answer(status: int = 200) -> Any:
        if status == 200:
            return JSONResponse(MESSAGE)
        return JSONResponse({"error": {"message": "why", "type": "SomeError", "code": status, "param": None}}, status)

    @app.post("/v1/text")
    async def text() -> Any:
        return StreamingResponse(iter(["a", "b"]), 400, media_type="text/plain")

    app.add_middleware(AuthenticationMiddleware, tokens=["key"])
    app.add_middleware(ErrorFormat)
    return app


@pytest.mark.parametrize("header", ["api_key", "auth_token"])
def test_anthropics_client_may_send_its_key_either_way(app: FastAPI, header: str) -> None:
    with TestClient(app) as http:
        client = anthropic.Anthropic(**{header: "key"}, base_url="http://testserver", http_client=http, max_retries=0)  # type: ignore[arg-type]
        assert client.messages.create(**ASKED).id == "m"
        wrong = anthropic.Anthropic(**{header: "no"}, base_url="http://testserver", http_client=http, max_retries=0)  # type: ignore[arg-type]
        with pytest.raises(anthropic.AuthenticationError) as refused:
            wrong.messages.create(**ASKED)
    assert refused.value.body == {"type": "error", "error": {"type": "authentication_error", "message": "Unauthorized"}}


def test_the_key_of_another_scheme_gives_way_and_other_paths_have_one_header(app: FastAPI) -> None:
    with TestClient(app) as http:
        both = {"x-api-key": "key", "authorization": "Basic abc"}
        assert http.post("/v1/messages", json=ASKED, headers=both).status_code == 200
        assert http.post("/v1/messages", json=ASKED, headers={**both, "authorization": "Bearer no"}).status_code == 401
        refused = http.post("/v1/chat/completions", json=ASKED, headers={"x-api-key": "key"})
        assert (refused.status_code, refused.json()) == (401, {"error": "Unauthorized"})


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (404, "not_found_error"),
        (413, "request_too_large"),
        (418, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (503, "overloaded_error"),
    ],
)
def test_every_status_has_anthropics_type(app: FastAPI, status: int, kind: str) -> None:
    with TestClient(app, headers={"x-api-key": "key", "authorization": "Bearer key"}) as http:
        answer = http.post(f"/v1/messages?status={status}", json=ASKED)
        assert (answer.status_code, answer.json()) == (
            status,
            {"type": "error", "error": {"type": kind, "message": "why"}},
        )
        assert http.post(f"/v1/chat/completions?status={status}", json=ASKED).json()["error"]["type"] == "SomeError"
        assert http.get("/v1/messages/none").json()["error"] == {"type": "not_found_error", "message": "Not Found"}
        assert http.post("/v1/text").text == "ab"


def test_the_words_for_a_prompt_that_is_too_long_are_openais() -> None:
    assert overflow(16384, 17068, "messages") == (
        "This model's maximum context length is 16384 tokens. However, your messages resulted in 17068 tokens."
        " Please reduce the length of the messages."
    )
