"""Shared by all tests: one real `vllm serve` of the small model per session."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Generator, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, settings

from demo.server import Server, on_gpu, serve
from tests.support import caged_lines, durations, warm_vllm
from tests.support.certificates import certificate
from tests.support.machine import SAME_EVERYWHERE, without_namespaces
from tests.support.mcp_servers import McpServers
from tests.support.places import CACHE, PYTHON, ROOT
from tests.support.scale import SOAK
from tests.support.turns import alone_in, turn
from tests.support.vllm_log import heard

if not on_gpu():
    os.environ.setdefault("OMP_NUM_THREADS", "1")
"""The small model's products take microseconds: with two threads a process, workers wait for one another's cores."""

RECORDER = pytest.StashKey[caged_lines.Recorder]()


def pytest_configure(config: pytest.Config) -> None:
    """Two workers share no temporary folder: some tests look at what is left there."""
    if worker := os.environ.get("PYTEST_XDIST_WORKER"):
        tempfile.tempdir = os.environ["TMPDIR"] = tempfile.mkdtemp(prefix=f"gptoss-test-{worker}-")
        os.chmod(tempfile.tempdir, 0o755)  # other users' servers are tested too
        atexit.register(shutil.rmtree, tempfile.tempdir, ignore_errors=True)  # runs after multiprocessing's
    else:  # the process that starts the workers, or the only one
        if "GPTOSS_DURATIONS" in os.environ:
            config.pluginmanager.register(durations.Recorder())
        folder = tempfile.mkdtemp(prefix="gptoss-trust-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        os.environ["SSL_CERT_FILE"] = certificate(Path(folder), "test.invalid")[0]  # each client reads it 40 ms faster
    settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("any machine")  # how long an example takes is no test's claim
    if "COVERAGE_PROCESS_CONFIG" in os.environ:
        config.stash[RECORDER] = caged_lines.Recorder(ROOT / "vllm_gptoss")
        config.stash[RECORDER].install()


@pytest.hookimpl(tryfirst=True)  # before pytest-cov combines
def pytest_sessionfinish(session: pytest.Session) -> None:
    if recorder := session.config.stash.get(RECORDER, None):
        recorder.save(ROOT / ".coverage")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A file of which `-m` chooses no test is not even imported: vLLM's import takes seconds."""
    if collection_path.suffix != ".py":
        return None
    return durations.leaves_out(config.option.markexpr, collection_path.read_text("utf-8")) or None


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what is slow. Where several workers run the suite, the longest files come first, so that no worker is left
    with one in the end; what must run alone comes last, by one worker."""
    for item in items:
        if durations.is_slow(item.nodeid):
            item.add_marker("slow")
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return

    def place(item: pytest.Item) -> tuple[int, float]:
        if asks_the_server(item.path):
            return 0, 0.0
        last = item.get_closest_marker("alone") is not None
        return 1 + last, -durations.seconds_of_file(item.nodeid.partition("::")[0])

    items.sort(key=place)


def pytest_collection_finish() -> None:
    """Excludes imported modules from garbage collection, which would visit a million objects each time."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True, tryfirst=True)  # a test's time limit begins when it is its turn
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, Any, Any]:
    del nextitem
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return (yield)
    folder: Path = item.config._tmp_path_factory.getbasetemp().parent
    with turn(folder, alone=item.get_closest_marker("alone") is not None):
        return (yield)


@cache
def asks_the_server(path: Path) -> bool:
    """Whether a file's tests use the fixtures `served` (directly or through `ask`) or `forced`."""
    return re.search(r"\b(served|forced): Server\b|\bask: Ask", path.read_text("utf-8")) is not None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """One worker has the shared servers, one what runs alone; other tests of a file stay together.

    xdist's own groups do nothing in pytest 9.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Scheduler(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file, _, test = nodeid.partition("::")
            if asks_the_server(ROOT / file):
                return "served"
            return "alone" if test.partition("[")[0] in alone_in(ROOT / file) else file

    return Scheduler(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    ours = logging.getLogger("vllm_gptoss")  # as an earlier test left it: with vLLM's level and handlers
    ours.handlers, ours.propagate = [], True
    ours.setLevel(logging.NOTSET)
    if item.get_closest_marker("namespaces") and (why := without_namespaces()):
        pytest.skip(why)


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """The small gpt-oss, expanded once for all runs; on a GPU in a shape that the kernels support."""
    from demo.expand import model_dir

    return model_dir(CACHE, wide=on_gpu())


@pytest.fixture(scope="session")
def mcp_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[McpServers]:
    """MCP servers over streamable HTTP, SSE and stdio, which `served` knows."""
    servers = McpServers.under(tmp_path_factory.mktemp("mcp"))
    for server in servers.all:
        server.start()
    yield servers
    for server in servers.all:
        server.stop()


@pytest.fixture(scope="session")
def served(model_dir: Path, mcp_servers: McpServers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with the plugin and its own tools: `.url`, `.api`, `.log`."""
    start = subprocess.Popen if SOAK else warm_vllm.popen  # tests/demo/test_run.py starts one as a user would
    home = tmp_path_factory.mktemp("served")
    tools = home / "tools.yaml"
    requests = {"allowed_hosts": ["127.0.0.1"]}
    tools.write_text(yaml.safe_dump({"python": PYTHON, "mcp": mcp_servers.config, "requests": requests}))
    documents = {"GPTOSS_BROWSER_DOCUMENTS": str(ROOT / "demo" / "documents")}
    environment = {"XDG_STATE_HOME": str(home), **documents, **SAME_EVERYWHERE}
    with serve(model_dir, home / "serve.log", ["--tool-server", f"demo,{tools}"], environment, popen=start) as server:
        yield server


@pytest.fixture(scope="session")
def forced(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that generates what a request forces it to, with calls unconstrained so that anything can come."""
    home = tmp_path_factory.mktemp("forced")
    arguments = ["--logits-processors", "tests.server.harmony.forced:ForcedTokens"]
    environment = {"PYTHONPATH": str(ROOT), "GPTOSS_STRICT_TOOLS": "0", "XDG_STATE_HOME": str(home), **SAME_EVERYWHERE}
    with serve(model_dir, home / "serve.log", arguments, environment, popen=warm_vllm.popen) as server:
        yield server


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.LogCaptureFixture]:
    """Warnings of this process. No line counts as logged before."""
    from vllm_gptoss import fallback

    monkeypatch.setattr(fallback, "_said", set())
    with heard(caplog, logging.WARNING):
        yield caplog


@pytest.fixture
def warm_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines of `vllm_gptoss.cli.bench` start with vLLM imported, and compile nothing for logprobs."""
    from vllm_gptoss.cli.bench import worker

    def run(command: Sequence[str], env: Mapping[str, str], **_: Any) -> subprocess.CompletedProcess[str]:
        done = warm_vllm.run(command, env, 300)
        print(done.stdout[-3000:])
        return done

    monkeypatch.setattr(worker, "subprocess", SimpleNamespace(run=run))
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
