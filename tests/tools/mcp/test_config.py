"""Every form of `--tool-server`, and errors that name the wrong key and the fix."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_gptoss.tools.browser.guard import host_entry
from vllm_gptoss.tools.browser.settings import BrowserConfig
from vllm_gptoss.tools.config import ToolConfigError, parse_spec
from vllm_gptoss.tools.mcp.settings import McpServerConfig, MissingVariableError, bearer, expand
from vllm_gptoss.tools.server import ToolServer, ToolServerOptions

FULL = """
python:
  timeout_s: 30
browser:
  backend: offline
  documents: docs
mcp:
  tickets:
    url: https://mcp.example/mcp
    headers: {X-Tenant: "${TENANT}"}
    authorization_env: TICKETS_TOKEN
    require_approval: {never: [list], always: [delete]}
  local:
    command: ./server
    args: [--quiet]
requests:
  allowed_hosts: ["*.example"]
max_running_calls: 8
"""


def test_demo_is_python_and_browser_without_any_key() -> None:
    plan = parse_spec("demo", {})
    assert plan.python == {}
    assert plan.browser == BrowserConfig()
    assert plan.mcp == []


def test_upstreams_form_is_mcp_over_sse_named_by_the_server() -> None:
    plan = parse_spec("localhost:8001, 10.0.0.2:8000", {})
    assert [(label, config.url, config.wire) for label, config in plan.mcp] == [
        ("", "http://localhost:8001/sse", "sse"),
        ("", "http://10.0.0.2:8000/sse", "sse"),
    ]


def test_forms_mix() -> None:
    plan = parse_spec("demo,https://a.example/mcp,http://b.example/x/sse,stdio:uvx 'my server' --flag", {})
    assert plan.python is not None
    assert [config.wire for _, config in plan.mcp] == ["streamable_http", "sse", "stdio"]
    assert (plan.mcp[2][1].command, plan.mcp[2][1].args) == ("uvx", ["my server", "--flag"])


def test_a_file_is_read_and_its_paths_are_relative_to_it(tmp_path: Path) -> None:
    file = tmp_path / "tools.yaml"
    file.write_text(FULL)
    plan = parse_spec(str(file), {})
    assert plan.python == {"timeout_s": 30}
    assert plan.browser.documents == tmp_path / "docs"
    servers = dict(plan.mcp)
    assert servers["local"].cwd == tmp_path
    assert [servers["tickets"].needs_approval(tool) for tool in ("list", "delete", "new")] == [False, True, True]
    assert plan.requests.allowed_hosts == ["*.example"]
    assert plan.max_running_calls == 8


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("browsr: true", "browsr: there is no such key"),
        ("browser: {backend: google}", "browser.backend: "),
        ("browser: {max_bytes: 0}", "browser.max_bytes: "),
        ("browser: {documents: d, depth: 3}", "browser.depth: there is no such key"),
        ("mcp: {a: {}}", "mcp.a: give exactly one of `url` and `command`"),
        ("mcp: {a: {url: 'ftp://x'}}", "mcp.a: `url` must begin with http"),
        ("mcp: {a: {url: 'http://x', command: y}}", "mcp.a: give exactly one"),
        ("mcp: {my server: {url: 'http://x'}}", "mcp.my server: the model cannot call a tool by this name"),
        ("mcp: {functions: {url: 'http://x'}}", "mcp.functions: this name means something else"),
        ("mcp: {python: {url: 'http://x', kind: mcp}}", "mcp.python: this name means something else"),
        ("requests: {allowed_hosts: ['*']}", "requests.allowed_hosts: '*' is not `host`, `*.domain` or `host:port`"),
        ("requests: {allowed_hosts: ['https://a.example/']}", "requests.allowed_hosts: 'https://a.example/' is not"),
        ("browser: {allow_hosts: ['*.internal']}", "browser.allow_hosts: '*.internal' is not `host` or `host:port`"),
        ("mcp: {a: {command: x, ca_file: y}}", "mcp.a: `ca_file` is for a `url`"),
        ("mcp: {a: {url: 'http://x', oauth: {client_id_env: A, issuer: 'http://i'}}}", "`refresh_token_env`, or both"),
        ("mcp: {a: {url: 'http://x', transport: stdio}}", "mcp.a: stdio needs a `command`"),
        ("mcp: {a: {url: 'http://x', require_approval: maybe}}", "mcp.a.require_approval"),
        ("mcp: {a: {url: 'http://x', timeout_s: soon}}", "mcp.a.timeout_s: "),
        ("mcp: [a]", "mcp: "),
        ("- a", "the top level must be a mapping"),
        ("a: [", "not YAML"),
    ],
)
def test_a_wrong_file_is_refused_with_the_key(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "tools.yaml"
    file.write_text(text)
    with pytest.raises(ToolConfigError) as caught:
        parse_spec(str(file), {})
    assert said in str(caught.value)
    assert str(file) in str(caught.value)


def test_a_wrong_python_option_is_refused_with_the_key(tmp_path: Path) -> None:
    file = tmp_path / "tools.yaml"
    file.write_text("python: {time_out: 3}")
    with pytest.raises(ToolConfigError, match=r"python\.time_out: there is no such key"):
        ToolServer.from_spec(str(file), ToolServerOptions(environ={}))


@pytest.mark.parametrize(
    "spec", ["", " , ", "localhost", "host:port", "a.example/mcp", "stdio:", "stdio:'x", "no.yaml", "x:99999"]
)
def test_a_spec_of_no_known_form_is_refused(spec: str) -> None:
    with pytest.raises(ToolConfigError):
        parse_spec(spec, {})


def test_one_server_cannot_be_configured_twice(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.yaml").write_text("mcp: {same: {url: 'http://x.example'}}")
    with pytest.raises(ToolConfigError, match=r"mcp\.same is configured twice"):
        parse_spec(f"{tmp_path}/a.yaml,{tmp_path}/b.yaml", {})


def test_secrets_come_from_the_environment_and_missing_ones_are_named() -> None:
    config = McpServerConfig(url="http://x.example", authorization_env="TOKEN", headers={"X": "a${B}c"})
    assert bearer(config, {"TOKEN": "t", "B": "b"}) == {"X": "abc", "Authorization": "Bearer t"}
    with pytest.raises(MissingVariableError, match="TOKEN is not set"):
        bearer(config, {"B": "b"})
    assert expand("$HOME ${A}", {"A": "1"}) == "$HOME 1"


@pytest.mark.parametrize("value", ["tok\nX-Admin: 1", "tok\r\n\r\n", "t\u00f6k", "tok\x00"])
def test_a_secret_that_http_cannot_carry_is_refused_without_being_shown(value: str) -> None:
    config = McpServerConfig(url="http://x", authorization_env="TOKEN")
    if value.strip() == "tok":  # only a line break at the end, as files have
        assert bearer(config, {"TOKEN": value}) == {"Authorization": "Bearer tok"}
        return
    with pytest.raises(ValueError, match="'Authorization' has characters") as caught:
        bearer(config, {"TOKEN": value})
    assert "tok" not in str(caught.value)


def test_hosts_are_compared_as_they_are_meant() -> None:
    entries = ["A.Example.", "b.example:8443", "*.c.example", "[::1]:8000", "::1", "[fd00::1]", "127.1"]
    assert [host_entry(entry, wildcard=True) for entry in entries] == [
        "a.example", "b.example:8443", "*.c.example", "::1:8000", "::1", "fd00::1", "127.0.0.1",
    ]  # fmt: skip
    with pytest.raises(ToolConfigError, match="GPTOSS_MCP_ALLOWED_HOSTS: "):
        parse_spec("browser", {"GPTOSS_MCP_ALLOWED_HOSTS": "a.example, http://b.example"})
    for wrong in ("", "*", "a/b", "u@a", "a:b", "a b", "a?b", "x*.example", "*.*.example"):
        with pytest.raises(ValueError, match="host|Port|port"):
            host_entry(wrong, wildcard=True)
