"""Keys of a tools service: who has none gets nothing, and no start-up leaves the door open by mistake."""

from __future__ import annotations

import hashlib
from pathlib import Path

import httpx
import pytest
import typer
from typer.testing import CliRunner

from tests.support.servers import running
from vllm_gptoss.tools.config import ToolConfigError
from vllm_gptoss.tools.serve import Listening, http_app, serve
from vllm_gptoss.tools.server import ToolServer, ToolServerOptions
from vllm_gptoss.tools.service.access import VARIABLE, load_keys

KEY = "0123456789abcdef0123456789abcdef"
ENVIRON = {"GPTOSS_BROWSER_DOCUMENTS": str(Path(__file__).parents[1] / "browser" / "documents")}


@pytest.mark.parametrize(
    ("header", "known"),
    [
        (f"Bearer {KEY}", True),
        (f"bearer  {KEY} ", True),
        (f"Bearer {KEY}x", False),
        (f"Bearer {KEY[:-1]}", False),
        (f"Basic {KEY}", False),
        (KEY, False),
        (f"Bearer sha256:{hashlib.sha256(KEY.encode()).hexdigest()}", False),
        ("Bearer ", False),
        ("Bearer é", False),
        (None, False),
    ],
)
@pytest.mark.parametrize("hashed", [False, True])
def test_only_a_whole_key_of_the_file_is_let_in(tmp_path: Path, header: str | None, known: bool, hashed: bool) -> None:
    file = tmp_path / "keys"
    line = f"sha256:{hashlib.sha256(KEY.encode()).hexdigest()}" if hashed else KEY
    file.write_text(f"# the replicas\n\n{line}  # since May\nanother key, quite long\n")
    keys = load_keys(file, {})
    caller = keys.caller(header)
    assert (caller is not None) is known
    if known:
        assert caller == hashlib.sha256(KEY.encode()).hexdigest()[:32], "by its hash, the same on every node"
        assert caller != keys.caller("Bearer another key, quite long")


def test_keys_come_from_the_variable_too() -> None:
    keys = load_keys(None, {VARIABLE: f"{KEY},{KEY[::-1]}"})
    assert keys.caller(f"Bearer {KEY[::-1]}")
    assert load_keys(None, {}).caller(None) == "", "without keys everybody is one caller"


@pytest.mark.parametrize(
    ("content", "problem"), [("", "no key"), ("# only words", "no key"), ("short", "openssl rand"), (None, "No such")]
)
def test_a_keys_file_that_protects_nothing_is_refused(tmp_path: Path, content: str | None, problem: str) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ToolConfigError, match=problem):
        load_keys(file, {})


def test_other_addresses_than_the_loopback_need_keys_or_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(ToolConfigError, match="--keys-file or GPTOSS_TOOLS_KEYS, or --no-auth"):
        Listening("0.0.0.0").keys()
    assert not Listening("0.0.0.0", open_to_all=True).keys().digests
    monkeypatch.setenv(VARIABLE, KEY)
    assert Listening("0.0.0.0").keys().digests


def test_the_command_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    app = typer.Typer()
    app.command()(serve)
    for arguments, advice in (
        (["browser", "--host", "0.0.0.0"], "give --keys-file"),
        (["browser", "--keys-file", str(tmp_path / "none")], "No such file"),
        (["127.0.0.1:1"], "no tool can be served"),
    ):
        done = CliRunner().invoke(app, arguments)
        assert (done.exit_code, advice in done.output) == (2, True), done.output


async def test_every_path_asks_for_a_key_but_the_health_check(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = load_keys(None, {VARIABLE: KEY})
    async with (
        ToolServer.from_spec("browser", ToolServerOptions(environ=ENVIRON)) as tools,
        running(http_app(tools.providers, "127.0.0.1", keys)) as url,
        httpx.AsyncClient(base_url=url) as client,
    ):
        tools = ("/mcp", "/sse", "/browser/mcp", "/browser/sse", "/messages/", "/containers/c/files")
        for path in (*tools, "/", "/health/x", "/metrics"):
            for method in ("GET", "POST", "DELETE"):
                answer = await client.request(method, path, headers={"authorization": "Bearer wrong"})
                assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer"), (method, path)
                assert KEY not in answer.text
        assert (await client.get("/health")).status_code == 200
        metrics = await client.get("/metrics/", headers={"authorization": f"Bearer {KEY}"})
        assert "gptoss_tool_calls" in metrics.text
        ours = {"authorization": f"Bearer {KEY}", "host": "tools.example"}
        assert (await client.post("/mcp", headers=ours, json={})).status_code != 401
        assert (await client.post("/mcp", headers=ours, json={})).status_code != 421, "a proxy passes its own name on"
