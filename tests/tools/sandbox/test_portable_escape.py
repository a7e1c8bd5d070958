"""What a program in the portable tier must not be able to do: from inside WebAssembly, and had it broken out of that.

Every attempt is bounded in size and time, and nothing is sent to an address off this machine. Runs as the current user;
`test_escape_as_user` does so as an ordinary user.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from vllm_gptoss.tools.protocol import File, SessionOptions, ToolCall, ToolResult
from vllm_gptoss.tools.python import PythonOptions, PythonProvider
from vllm_gptoss.tools.sandbox import landlock

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROOT = Path(__file__).resolve().parents[3]
OPTIONS = PythonOptions(
    launcher="portable", timeout_s=10, memory_mib=256, scratch_mib=16, inodes=1000, warm=1, max_conversations=3
)
PRELUDE = """
import errno, os
def attempt(name, function, *args):
    try:
        got = function(*args)
    except (OSError, AttributeError, ImportError, NotImplementedError, RuntimeError) as error:
        print('blocked', name, type(error).__name__)
    else:
        print('ESCAPED', name, repr(got)[:300])
def read(path):
    with open(path, 'rb') as file: return file.read(4096)
def write(path):
    with open(path, 'a') as file: file.write('x')
"""


@dataclass(frozen=True)
class Host:
    """Secrets that no program inside may read."""

    secret: str
    directory: Path
    model: Path
    port: int


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    secret = f"canary-{secrets.token_hex(8)}"
    directory = tmp_path_factory.mktemp("host")
    model = directory / "model-00001-of-00001.safetensors"
    model.write_text(secret)
    os.environ["GPTOSS_TEST_TOKEN"] = secret
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as server:
        yield Host(secret, directory, model, server.getsockname()[1])
    del os.environ["GPTOSS_TEST_TOKEN"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def provider(host: Host, interpreter_cache: Path) -> AsyncIterator[PythonProvider]:
    provider = PythonProvider(OPTIONS)
    await provider.start()
    assert provider.unavailable is None, provider.unavailable
    yield provider
    await provider.aclose()


async def run(provider: PythonProvider, code: str, conversation: str = "") -> ToolResult:
    session = await provider.open(conversation or secrets.token_hex(4), SessionOptions())
    return await session.call(ToolCall("call", "python", None, PRELUDE + code))


async def all_blocked(provider: PythonProvider, code: str, attempts: int) -> None:
    """Runs attempts, each of which must have been made and refused."""
    result = await run(provider, code)
    assert "ESCAPED" not in result.text, result.text
    assert sum(line.startswith("blocked ") for line in result.text.splitlines()) == attempts, result.text


def process_of(provider: PythonProvider, conversation: str) -> int:
    kernel = provider._containers[conversation]._kernel
    return int(kernel.sandbox._process.pid)


async def test_reads_nothing_of_the_host(provider: PythonProvider, host: Host) -> None:
    up = "../" * 12
    paths = [
        *("/etc/shadow", "/etc/passwd", "/proc/self/environ", "/proc/1/environ", "/proc/self/mem", "/dev/mem", "/sys"),
        *(str(host.model), __file__, f"/proc/{os.getpid()}/environ", str(Path.home() / ".bashrc"), sys.executable),
        *(f"{up}etc/passwd", f"/mnt/data/{up}etc/passwd", f"/tmp/{up}etc/passwd", f"/usr/local/lib/{up}etc/passwd"),
        *("/usr/local/lib/../python.cwasm", "/usr/lib/notebook/../options.py", "/mnt/data/../home", "/mnt/data//../.."),
    ]
    await all_blocked(provider, f"for path in {paths!r}: attempt(path, read, path)", len(paths))


async def test_links_lead_nowhere_inside_and_for_the_server(provider: PythonProvider, host: Host) -> None:
    code = f"""
made = 0
for name, target in (('a', '/etc/passwd'), ('b', {str(host.model)!r}), ('c', '../' * 12 + 'etc/passwd'), ('d', '..')):
    try: os.symlink(target, name); made += 1
    except OSError: pass
    attempt(name, read, name if name != 'd' else 'd/../../etc/passwd')
attempt('hard', os.link, '/etc/passwd', '/mnt/data/hard')
open('real.txt', 'w').write('real'); os.mkdir('d2'); open('d2/deep.txt', 'w').write('deep')
"""
    result = await run(provider, code, "links")
    assert "ESCAPED" not in result.text
    assert result.text.count("blocked ") == 5, result.text
    files = {c.filename: c for c in result.content if isinstance(c, File)}
    assert sorted(files) == ["d2/deep.txt", "real.txt"]
    stored = await provider.read_file(files["real.txt"].container_id, files["real.txt"].file_id)
    assert stored.data == b"real"


async def test_writes_nothing_outside(provider: PythonProvider, host: Host) -> None:
    library, program = "/usr/local/lib", "/usr/lib/notebook"
    paths = [
        *("/x", "/etc/x", "/dev/x", "/mnt/x", "/mnt/data/../x", "/proc/self/mem"),
        *(f"{library}/x", f"{library}/python315.zip", f"{program}/notebook.py"),
        *(str(host.directory / "x"), str(host.model), str(ROOT / "x")),
    ]
    code = f"""
for path in {paths!r}: attempt(path, write, path)
attempt('rename', os.rename, '/usr/lib/notebook/notebook.py', '/mnt/data/x')
attempt('unlink', os.unlink, '/usr/lib/notebook/notebook.py')
try: os.chmod('/usr/local/lib', 0o777)
except (OSError, AttributeError): pass
"""
    await all_blocked(provider, code, len(paths) + 2)
    assert provider._pool.choice.launcher._runtime.library.stat().st_mode & 0o777 == 0o755
    assert host.model.read_text() == host.secret
    assert not (host.directory / "x").exists()


async def test_reaches_no_socket(provider: PythonProvider, host: Host) -> None:
    code = f"""
import socket, urllib.request
attempt('tcp', lambda: socket.create_connection(('127.0.0.1', {host.port}), 2))
attempt('http', urllib.request.urlopen, 'http://127.0.0.1:{host.port}/', None, 2)
for family in (1, 2, 10): attempt('socket', lambda: socket.socket(family).connect(('127.0.0.1', {host.port})))
for fd in range(40): attempt('fd', lambda: socket.socket(fileno=fd).send(b'x'))
attempt('name', lambda: socket.gethostbyname('localhost'))
"""
    await all_blocked(provider, code, 46)


async def test_starts_no_process_and_no_thread(provider: PythonProvider) -> None:
    code = """
import multiprocessing, signal, subprocess, threading
attempt('fork', lambda: os.fork())
attempt('exec', lambda: os.execv('/bin/sh', ['sh']))
attempt('spawn', lambda: os.posix_spawn('/bin/sh', ['sh'], {}))
attempt('system', lambda: os.system('true'))
attempt('subprocess', lambda: subprocess.run(['true']))
attempt('popen', lambda: os.popen('true').read())
attempt('multiprocessing', lambda: multiprocessing.Process(target=print).start())
attempt('thread', lambda: threading.Thread(target=print).start())
attempt('kill', lambda: os.kill(1, 0))
"""
    await all_blocked(provider, code, 9)


async def test_reaches_neither_native_code_nor_its_embedder(provider: PythonProvider) -> None:
    """WASI has no JavaScript behind it, ctypes no libraries, and the build's door to an embedder leads nowhere."""
    code = """
import importlib
for name in ('js', 'pyodide', 'pyodide_js', '_pyodide', 'wasmtime'): attempt(name, importlib.import_module, name)
import ctypes
attempt('dlopen', ctypes.CDLL, None)
attempt('address', ctypes.string_at, 4096)
"""
    await all_blocked(provider, code, 7)
    door = """
try:
    from host import tools
    print('listed', [n for n in dir(tools) if not n.startswith('_')])
    print('called', tools.system('id'))
except BaseException as error: print('nothing', type(error).__name__)
"""
    result = await run(provider, door)
    assert "nothing" in result.text
    assert "called" not in result.text


async def test_sees_nothing_of_the_server_in_itself(provider: PythonProvider, host: Host) -> None:
    """Its environment and arguments, as it sees them and as the kernel does."""
    code = "import sys, gc; print(dict(os.environ), sys.argv, sys.path, sys.orig_argv)"
    result = await run(provider, code, "self")
    assert "HOME" in result.text
    assert host.secret not in result.text
    assert str(ROOT) not in result.text
    environment = Path(f"/proc/{process_of(provider, 'self')}/environ")
    with contextlib.suppress(PermissionError):  # not even its parent may look, if both are one ordinary user
        assert host.secret.encode() not in environment.read_bytes()


async def test_conversations_do_not_see_each_other(provider: PythonProvider, host: Host) -> None:
    await run(provider, f"x = 1\nfor d in ('/mnt/data', '/tmp'): open(d + '/{host.secret}', 'w').write('x')", "first")
    code = "print([names for top in ('/mnt/data', '/tmp', '/') for *_, names in os.walk(top)], 'x' in globals())"
    assert (await run(provider, code, "second")).text.strip() == "[[], []] False"


async def test_nothing_runs_between_calls(provider: PythonProvider) -> None:
    """A program that reports its end but continues is stopped until the next call, and cannot forge its answer."""
    code = """
import json, sys, time
frame = sys._getframe()
while 'request' not in frame.f_locals: frame = frame.f_back
reply = ['reply', {'id': frame.f_locals['request']['id'], 'content': {'status': 'ok'}}]
os.write(1, b'\\x1e' + json.dumps(reply).encode() + b'\\n')
end = time.monotonic() + 2
while time.monotonic() < end: write('/mnt/data/ticks')
"""
    first = await run(provider, code, "ghost")
    assert first.error is None
    stat = Path(f"/proc/{process_of(provider, 'ghost')}/stat")

    def fields() -> list[str]:
        return stat.read_text().rpartition(")")[2].split()

    for _ in range(100):
        if fields()[0] == "T":  # a signal takes effect when its process is next run
            break
        await asyncio.sleep(0.02)
    before = fields()
    await asyncio.sleep(0.5)  # what is measured: that nothing happens in this time
    later = fields()
    assert later[0] == "T"
    assert before[11:13] == later[11:13]  # CPU time
    assert "42" in (await run(provider, "print(6 * 7)", "ghost")).text


async def test_process_has_given_away_what_it_could(provider: PythonProvider) -> None:
    await run(provider, "1", "locked")
    pid = process_of(provider, "locked")
    for task in Path(f"/proc/{pid}/task").iterdir():
        status = dict(line.split(":\t", 1) for line in (task / "status").read_text().splitlines() if ":\t" in line)
        assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2"), task
        assert {int(status[name], 16) for name in ("CapEff", "CapPrm", "CapAmb", "CapInh")} == {0}
        assert "0" not in status["Uid"].split()
        assert int(status["VmRSS"].split()[0]) < 300 << 10


BROKEN_OUT = """
import ctypes, errno, json, mmap, os, signal, socket, sys, threading
settings = json.loads(sys.argv[1]) | {'parent': os.getppid()}
import importlib.util as u
s = u.spec_from_file_location('gptoss_sandbox', sys.argv[2] + '/__init__.py', submodule_search_locations=[sys.argv[2]])
m = u.module_from_spec(s); sys.modules['gptoss_sandbox'] = m; s.loader.exec_module(m)
from gptoss_sandbox import wasm
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *args):
    ctypes.set_errno(0)
    if libc.syscall(ctypes.c_long(number), *[ctypes.c_long(a) for a in args]) < 0:
        raise OSError(ctypes.get_errno(), '')
def attempt(name, function, *args):
    try: got = function(*args)
    except OSError as error: print('blocked', name, errno.errorcode.get(error.errno), flush=True)
    else: print('ESCAPED', name, repr(got)[:100], flush=True)
wasm._lock(settings)
attempt('fork', os.fork)
attempt('exec', os.execv, '/bin/true', ['true'])
attempt('unix', socket.socket, socket.AF_UNIX)
attempt('tcp', socket.socket, socket.AF_INET)
attempt('pair', socket.socketpair)
attempt('kill', os.kill, os.getppid(), 0)
attempt('code', lambda: mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC))
attempt('limit', __import__('resource').prlimit, os.getppid(), 7)
attempt('nice', os.setpriority, os.PRIO_PROCESS, os.getppid(), 19)
for name, number in json.loads(sys.argv[3]).items(): attempt(name, call, number, 0, 0, 0, 0, 0)
thread = threading.Thread(target=attempt, args=('thread', os.fork)); thread.start(); thread.join()
for path in json.loads(sys.argv[4]): attempt(path, open, path)
attempt('write', open, settings['mounts'][1][0] + '/x', 'w')
attempt('inside', lambda: open(settings['mounts'][0][0] + '/x', 'w').close() or os.kill(-1, 0))
"""
_TABLE = """
    ptrace 101, process_vm_readv 310, pidfd_open 434, pidfd_getfd 438, unshare 272, setns 308, mount 165, chroot 161,
    bpf 321, userfaultfd 323, io_uring_setup 425, keyctl 250, clone3 435, perf_event_open 298, init_module 175,
    memfd_create 319, shmget 29, vfork 58, connect 42, sendmsg 46, tkill 200, tgkill 234, rt_sigqueueinfo 129,
    sched_setaffinity 203, chmod 90, mknod 133, seccomp 317, execveat 322, personality 135, setuid 105
"""
X86_64_CALLS = {name: int(number) for name, number in map(str.split, _TABLE.split(","))}


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers are x86_64's")
async def test_broken_out_of_webassembly_there_is_a_second_wall(
    provider: PythonProvider, host: Host, tmp_path: Path
) -> None:
    """The same lock around a native program, which is what a hole in the runtime would give."""
    shown = tmp_path / "shown"
    shown.mkdir()
    launcher = provider._pool.choice.launcher
    sandbox = await launcher.spawn()
    settings = sandbox._settings
    settings["mounts"] = [settings["mounts"][0], [str(shown), "/shown", False]]
    secrets_ = [str(host.model), "/etc/passwd", "/proc/self/environ", f"/proc/{os.getpid()}/environ", "/proc/self/mem"]
    package = str(ROOT / "vllm_gptoss" / "tools" / "sandbox")
    words = [json.dumps(settings), package, json.dumps(X86_64_CALLS), json.dumps(secrets_)]
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-I", "-c", BROKEN_OUT, *words],
        capture_output=True,
        text=True,
        timeout=60,
        env={},
    )
    await sandbox.aclose()
    lines = done.stdout.splitlines()
    escaped = [line for line in lines if line.startswith("ESCAPED")]
    if not landlock.abi():  # the files of its user are then behind WebAssembly alone: docs/security.md
        escaped = [line for line in escaped if not line.split()[1].startswith(("/", "write"))]
    assert not escaped, done
    assert len(lines) == 9 + len(X86_64_CALLS) + 1 + len(secrets_) + 2, done
    refusals = {line.split()[-1] for line in lines}
    assert refusals <= {"EPERM", "EACCES", "ENOSYS", "EAFNOSUPPORT"}, lines
