"""The web page runs no foreign and no inline code, is off by default, and needs the plugin's Responses API."""

from __future__ import annotations

import re
import shutil
import subprocess
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from tests.support.responses import npm
from tests.support.responses.replay import ReplayEngine
from tests.support.responses.server import Running, Script, running
from tests.support.responses.turns import HELLO
from vllm_gptoss.server.parts import Parts
from vllm_gptoss.server.responses.options import ResponsesOptions
from vllm_gptoss.server.ui.pages import FOLDER
from vllm_gptoss.settings import Settings, SettingsError


@pytest.fixture(params=[True, False])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Running]:
    options = ResponsesOptions(store=str(tmp_path / "store.sqlite"), ui=request.param)
    with running(ReplayEngine(Script(HELLO)), options) as server:
        yield server


@pytest.mark.parametrize("server", [True], indirect=True)
def test_every_file_is_served_with_a_policy_against_foreign_code(server: Running) -> None:
    names = [path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*.*")]
    assert {"index.html", "chat.js", "vendor/katex.min.js"} <= set(names)
    with httpx.Client(base_url=server.url) as http:
        for name in names:
            answer = http.get("/ui/" + {"index.html": "", "server.html": "server"}.get(name, name))
            assert (answer.status_code, answer.content) == (200, (FOLDER / name).read_bytes())
            policy = answer.headers["content-security-policy"].split("; ")
            assert "default-src 'none'" in policy
            assert "script-src 'self'" in policy
            assert "frame-ancestors 'none'" in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert "set-cookie" not in answer.headers


@pytest.mark.parametrize("server", [True], indirect=True)
def test_the_root_leads_to_the_page_also_below_a_prefix(server: Running) -> None:
    with httpx.Client(base_url=server.url) as http:
        assert [http.get(path).headers["location"] for path in ("/", "/ui")] == ["ui/", "ui/"]
        assert http.get("/ui/../settings.py").status_code == 404
        assert http.get("/ui/%2e%2e/pages.py").status_code == 404


@pytest.mark.parametrize("server", [False], indirect=True)
def test_nothing_is_served_by_default(server: Running) -> None:
    with httpx.Client(base_url=server.url) as http:
        for path in ("/", "/ui", "/ui/", "/ui/chat.js", "/v1/ui/server"):
            assert http.get(path).status_code == 404


@pytest.mark.parametrize("server", [True], indirect=True)
def test_the_server_is_described(server: Running) -> None:
    with server.http() as http:
        found = http.get("/ui/server").json()
    assert found["object"] == "gptoss.server"
    assert (found["store"], found["tools"]) == ("sqlite", [])
    assert found["choices"] == {"layers": "replayed (a test)"}


def test_no_file_names_another_host_or_makes_nodes_from_strings() -> None:
    own = [path for path in FOLDER.rglob("*.*") if "vendor" not in path.parts]
    assert len(own) > 8
    for path in own:
        text = path.read_text()
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|DOMParser", text), path
        assert not re.search(r"https?://[a-z]", text), path
        assert not re.search(r"<script(?![^>]*\bsrc=)|\sstyle=|\son[a-z]+=\"", text), path


def test_every_text_of_the_pages_has_a_chinese_one() -> None:
    known = set(re.findall(r'^  (?:"(.+?)"|(\w+)): "', (FOLDER / "chinese.js").read_text(), re.MULTILINE))
    chinese = {quoted or plain for quoted, plain in known}
    texts = set()
    for path in FOLDER.glob("*.js"):
        texts |= set(re.findall(r'\b(?:t|button)\("([^"]+)"', path.read_text()))
    for path in FOLDER.glob("*.html"):
        text = re.sub(r"<option>.*?</option>|<title>.*?</title>", "", path.read_text())
        texts |= {found.strip() for found in re.findall(r">([^<>]*[A-Za-z][^<>]*)<", text)} - {"gpt-oss", "English"}
        texts |= set(re.findall(r'(?:aria-label|placeholder)="([^"]*)"', text))
    assert len(texts) > 60
    assert texts - chinese == set()


@pytest.mark.skipif(npm.missing() is not None, reason=str(npm.missing()))
def test_the_modules_have_the_types_that_they_declare(tmp_path: Path) -> None:
    shutil.copytree(FOLDER, tmp_path, dirs_exist_ok=True)
    for library in (tmp_path / "vendor").glob("*.js"):
        library.write_text("")
    checks = ["--strict", "--noEmit", "--allowJs", "--checkJs", "--noUnusedLocals", "--types", ""]
    target = ["--target", "es2023", "--lib", "es2023,dom,dom.iterable", "--module", "esnext"]
    files = [path.name for path in tmp_path.glob("*.js")]
    command = [npm.PACKAGES / ".bin" / "tsc", *checks, *target, "--moduleDetection", "force", *files]
    checked = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert checked.returncode == 0, checked.stdout[:5000]


def test_the_page_without_its_api_is_refused() -> None:
    with pytest.raises(SettingsError, match="GPTOSS_UI.*GPTOSS_ENDPOINT"):
        Parts(FastAPI(), Namespace(), Settings(ui=True, endpoint=False))
