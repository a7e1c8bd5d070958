"""What a program in the sandbox must not be able to do, tried for real.

Every attempt is bounded in size and time, so that it could not hurt the machine if a wall were missing, and nothing is
sent to an address off this machine. Runs as whoever runs it; `test_escape_as_user` does so as an ordinary user.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from vllm_gptoss.tools.base import File, SessionOptions, ToolCall, ToolResult
from vllm_gptoss.tools.python import PythonOptions, PythonProvider

pytestmark = pytest.mark.asyncio(loop_scope="module")

LAUNCHER = os.environ.get("GPTOSS_TEST_LAUNCHER", "namespaces")
OPTIONS = PythonOptions(
    launcher=LAUNCHER,
    hidden_paths=(f"{sys.prefix}/lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages/pip",),
    timeout_s=20,
    memory_mib=384,
    scratch_mib=64,
    inodes=2048,
    processes=48,
    warm=1,
    max_conversations=4,
    preload=(),
)
# Given to every attempt: runs a function and prints `blocked` with the reason, or `ESCAPED` with what it got.
PRELUDE = """
import ctypes, errno, json, os, signal, socket, sys, time
libc = ctypes.CDLL(None, use_errno=True)
def syscall(number, *args):
    ctypes.set_errno(0)
    result = libc.syscall(ctypes.c_long(number), *[ctypes.c_long(a) if isinstance(a, int) else a for a in args])
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
def attempt(name, function, *args):
    try:
        got = function(*args)
    except OSError as error:
        print('blocked', name, errno.errorcode.get(error.errno))
    else:
        print('ESCAPED', name, repr(got)[:300])
def read(path):
    with open(path, 'rb') as file:
        return file.read(4096)
def open_fd(fd):
    return os.path.lexists(f'/proc/self/fd/{fd}')
def processes():
    alive = 0
    for pid in filter(str.isdigit, os.listdir('/proc')):
        try: alive += open(f'/proc/{pid}/stat').read().rpartition(')')[2].split()[0] != 'Z'
        except OSError: pass
    return alive
def write(path):
    with open(path, 'a') as file:
        file.write('x')
"""


@dataclass(frozen=True)
class Host:
    """What the host has that nobody inside may get."""

    secret: str
    directory: Path
    model: Path
    port: int
    pid: int
    abstract: str
    path_socket: str


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    secret = f"canary-{secrets.token_hex(8)}"
    directory = tmp_path_factory.mktemp("host")
    model = directory / "model-00001-of-00001.safetensors"
    model.write_text(secret)
    os.environ["GPTOSS_TEST_TOKEN"] = secret
    with contextlib.ExitStack() as stack:
        tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        abstract = stack.enter_context(socket.socket(socket.AF_UNIX))
        abstract.bind("\0" + secret)
        abstract.listen()
        path_socket = str(directory / "s")
        local = stack.enter_context(socket.socket(socket.AF_UNIX))
        local.bind(path_socket)
        local.listen()
        yield Host(secret, directory, model, tcp.getsockname()[1], os.getpid(), secret, path_socket)
    del os.environ["GPTOSS_TEST_TOKEN"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def provider(host: Host) -> AsyncIterator[PythonProvider]:
    provider = PythonProvider(OPTIONS)
    await provider.start()
    assert provider.unavailable is None, provider.unavailable
    yield provider
    await provider.aclose()


async def run(provider: PythonProvider, code: str, conversation: str = "") -> ToolResult:
    session = await provider.open(conversation or secrets.token_hex(4), SessionOptions())
    return await session.call(ToolCall("call", "python", None, PRELUDE + code))


async def all_blocked(provider: PythonProvider, code: str, attempts: int) -> str:
    """Runs attempts, each of which must have been made and refused; returns what was printed."""
    result = await run(provider, code)
    lines = result.text.splitlines()
    assert "ESCAPED" not in result.text, result.text
    assert sum(line.startswith("blocked ") for line in lines) == attempts, result.text
    return result.text


async def test_reads_no_secret_file(provider: PythonProvider, host: Host) -> None:
    paths = [
        *("/etc/shadow", "/proc/1/environ", "/proc/1/mem", "/proc/1/root/etc/shadow", "/proc/kcore", "/dev/mem"),
        *("/proc/self/../1/environ", "/sys/kernel/uevent_helper"),
        *(str(host.model), __file__, f"/proc/{host.pid}/environ", f"/proc/{host.pid}/cwd/pyproject.toml"),
        *("/var/run/docker.sock", "/root/.bashrc", str(Path.home() / ".netrc")),
    ]
    if LAUNCHER == "namespaces":  # bubblewrap's /proc also has what is not about processes
        paths += ["/proc/kallsyms", "/proc/sys/kernel/core_pattern", "/proc/cpuinfo"]
    await all_blocked(provider, f"for path in {paths!r}: attempt(path, read, path)", len(paths))


async def test_sees_nothing_of_the_server_anywhere(provider: PythonProvider, host: Host) -> None:
    code = """
found = [str(os.environ)]
for directory, subdirectories, names in os.walk('/proc'):
    if directory.count('/') > 4 or 'task' in directory: subdirectories[:] = []
    for name in names:
        if name in ('environ', 'cmdline', 'maps', 'mountinfo', 'status'):
            try: found.append(read(os.path.join(directory, name)).decode(errors='replace'))
            except OSError: pass
print(len(found) > 3)
print('\\n'.join(found))
"""
    result = await run(provider, code)
    assert "True" in result.text
    assert host.secret not in result.text
    assert str(host.directory) not in result.text
    assert "GPTOSS_TEST_TOKEN" not in result.text


async def test_hidden_path_is_empty(provider: PythonProvider) -> None:
    result = await run(provider, f"print(os.listdir({str(OPTIONS.hidden_paths[0])!r}))")
    assert result.text.strip() == "[]"


async def test_inherits_no_descriptor(provider: PythonProvider, host: Host) -> None:
    code = """
print(json.dumps([os.readlink(f'/proc/self/fd/{fd}') for fd in os.listdir('/proc/self/fd') if open_fd(fd)]))
"""
    links = json.loads((await run(provider, code)).text)
    kinds = ("socket:", "pipe:", "anon_inode:", "/dev/null", "/run/", "/mnt/data", "/proc/")
    assert links
    assert not [link for link in links if not link.startswith(kinds)]


async def test_sees_no_device_but_the_harmless(provider: PythonProvider) -> None:
    result = await run(provider, "print(sorted(os.listdir('/dev')), os.path.exists('/sys/class'))")
    allowed = ["fd", "full", "null", "random", "shm", "stderr", "stdin", "stdout", "urandom", "zero"]
    assert result.text.strip() == f"{allowed} False"


async def test_runs_as_nobody_without_privilege(provider: PythonProvider) -> None:
    code = """
wanted = ('CapEff', 'CapBnd', 'CapPrm', 'CapAmb', 'NoNewPrivs', 'Seccomp:', 'Uid')
print([line.split(':')[1].strip() for line in open('/proc/self/status') if line.startswith(wanted)])
"""
    *_, uid, prm, eff, bnd, amb, privileges, seccomp = json.loads((await run(provider, code)).text.replace("'", '"'))
    assert {int(c, 16) for c in (prm, eff, bnd, amb)} == {0}
    assert "0" not in uid.split()
    assert (privileges, seccomp) == ("1", "2")


async def test_reaches_no_socket_of_the_host(provider: PythonProvider, host: Host) -> None:
    code = f"""
def connect(family, address):
    s = socket.socket(family); s.settimeout(2); s.connect(address); return s
attempt('tcp', connect, socket.AF_INET, ('127.0.0.1', {host.port}))
attempt('tcp6', connect, socket.AF_INET6, ('::1', {host.port}))
attempt('udp', socket.socket, socket.AF_INET, socket.SOCK_DGRAM)
attempt('raw', socket.socket, socket.AF_INET, socket.SOCK_RAW)
attempt('abstract', connect, socket.AF_UNIX, chr(0) + {host.abstract!r})
attempt('unix', connect, socket.AF_UNIX, {host.path_socket!r})
families = dict(NETLINK=16, PACKET=17, ALG=38, VSOCK=40, BLUETOOTH=31, TIPC=30, CAN=29, QIPCRTR=42, XDP=44, SMC=43)
for family, number in families.items(): attempt(family, socket.socket, number, socket.SOCK_RAW)
import urllib.request
attempt('http', urllib.request.urlopen, 'http://127.0.0.1:{host.port}/', None, 2)
"""
    await all_blocked(provider, code, 17)


async def test_writes_nothing_outside(provider: PythonProvider, host: Host) -> None:
    prefix = f"{sys.prefix}/lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages/x.pth"
    paths = [
        *("/x", "/usr/lib/x", "/etc/x", "/etc/passwd", "/root/x", "/var/cache/python/x", "/mnt/x", "/dev/x", "/proc/x"),
        *("/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/proc/1/oom_score_adj", "/sys/x", prefix),
        *(str(host.directory / "x"), str(host.model), f"/proc/{host.pid}/mem"),
    ]
    await all_blocked(provider, f"for path in {paths!r}: attempt(path, write, path)", len(paths))
    assert host.model.read_text() == host.secret
    assert not (host.directory / "x").exists()


X86_64_CALLS = {
    "ptrace-attach": (101, 16, 1, 0, 0),
    "process_vm_readv": (310, 1, 0, 0, 0, 0, 0),
    "process_vm_writev": (311, 1, 0, 0, 0, 0, 0),
    "pidfd_getfd": (438, 0, 0, 0),
    "kcmp": (312, 1, 1, 0, 0, 0),
    "mount": (165, 0, 0, 0, 0, 0),
    "umount2": (166, 0, 0),
    "pivot_root": (155, 0, 0),
    "chroot": (161, 0),
    "open_tree": (428, 0, 0, 0),
    "move_mount": (429, 0, 0, 0, 0, 0),
    "fsopen": (430, 0, 0),
    "mount_setattr": (442, 0, 0, 0, 0, 0),
    "unshare-user": (272, 0x10000000),
    "unshare-net": (272, 0x40000000),
    "setns": (308, 0, 0),
    "clone-user": (56, 0x10000000 | 17, 0, 0, 0, 0),
    "clone3": (435, 0, 0),
    "init_module": (175, 0, 0, 0),
    "finit_module": (313, 0, 0, 0),
    "delete_module": (176, 0, 0),
    "kexec_load": (246, 0, 0, 0, 0),
    "reboot": (169, 0, 0, 0, 0),
    "swapon": (167, 0, 0),
    "bpf": (321, 0, 0, 0),
    "perf_event_open": (298, 0, 0, -1, -1, 0),
    "userfaultfd": (323, 0),
    "io_uring_setup": (425, 1, 0),
    "io_uring_enter": (426, 0, 0, 0, 0, 0, 0),
    "keyctl": (250, 0, 0, 0, 0, 0),
    "add_key": (248, 0, 0, 0, 0, 0),
    "request_key": (249, 0, 0, 0, 0),
    "open_by_handle_at": (304, 0, 0, 0),
    "name_to_handle_at": (303, 0, 0, 0, 0, 0),
    "fanotify_init": (300, 0, 0),
    "quotactl": (179, 0, 0, 0, 0),
    "acct": (163, 0),
    "syslog": (103, 2, 0, 0),
    "iopl": (172, 3),
    "ioperm": (173, 0, 1, 1),
    "modify_ldt": (154, 0, 0, 0),
    "settimeofday": (164, 0, 0),
    "sethostname": (170, 0, 0),
    "personality": (135, 0x0040000),
    "memfd_create": (319, 0, 0),
    "memfd_secret": (447, 0),
    "shmget": (29, 0, 4096, 0o1600),
    "msgget": (68, 0, 0o1600),
    "mq_open": (240, 0, 0, 0, 0),
    "sched_setaffinity": (203, 0, 0, 0),
    "seccomp": (317, 1, 0, 0),
    "setuid": (105, 0),
    "unknown": (999, 0),
}


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers are x86_64's")
async def test_makes_no_dangerous_system_call(provider: PythonProvider) -> None:
    """Refused by the filter itself (EPERM, ENOSYS), not by chance for its arguments (EFAULT, EINVAL)."""
    code = f"for name, call in {X86_64_CALLS!r}.items(): attempt(name, syscall, *call)"
    text = await all_blocked(provider, code, len(X86_64_CALLS))
    assert {line.split()[-1] for line in text.splitlines() if line.startswith("blocked")} == {"EPERM", "ENOSYS"}


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="other machines have no 32-bit entry like this")
async def test_foreign_system_calls_kill(provider: PythonProvider) -> None:
    code = """
import mmap
def in_child(function):
    pid = os.fork()
    if pid == 0:
        signal.alarm(5)
        function(); os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
page.write(b'\\xb8\\x14\\0\\0\\0\\xcd\\x80\\xc3')  # mov eax, 20 (getpid of i386); int 0x80; ret
i386 = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
x32 = lambda: libc.syscall(ctypes.c_long(0x40000000 | 39))
print(in_child(i386) == -signal.SIGSYS, in_child(x32) == -signal.SIGSYS)
"""
    assert (await run(provider, code)).text.strip() == "True True"


async def test_cannot_touch_its_supervisor(provider: PythonProvider) -> None:
    code = """
import resource
attempt('limit', resource.prlimit, 1, resource.RLIMIT_NOFILE, (0, 0))
attempt('nice', os.setpriority, os.PRIO_PROCESS, 1, 19)
attempt('nice-user', os.setpriority, os.PRIO_USER, 0, 19)
attempt('idle', os.sched_setscheduler, 1, os.SCHED_IDLE, os.sched_param(0))
attempt('memory', read, '/proc/1/mem')
attempt('maps', read, '/proc/1/maps')
attempt('descriptors', os.listdir, '/proc/1/fd')
attempt('oom', write, '/proc/1/oom_score_adj')
for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGSEGV):
    try: os.kill(1, number)
    except OSError: pass
print('alive', open('/proc/1/stat').read().split()[2])
"""
    result = await run(provider, code, "touch")
    assert "ESCAPED" not in result.text
    assert result.text.count("blocked ") == 8, result.text
    assert (await run(provider, "print('still', 'here')", "touch")).text.strip() == "still here"


async def test_signals_nobody_outside(provider: PythonProvider, host: Host) -> None:
    result = await all_blocked(provider, f"attempt('kill', os.kill, {host.pid}, 0)", 1)
    assert "ESRCH" in result


async def test_starts_no_program_on_the_host_by_crashing(provider: PythonProvider) -> None:
    code = """
import resource
print(resource.getrlimit(resource.RLIMIT_CORE))
for value in ((0, 0), (0, 1)):
    try: resource.setrlimit(resource.RLIMIT_CORE, value); print('ESCAPED')
    except (OSError, ValueError): print('blocked')
"""
    result = await run(provider, code)
    hard = "(0, 0)" if "(0, 0)" in result.text else "(1, 1)"  # an outer hard limit of 0 cannot be raised
    assert result.text.split("\n")[:3] == [hard, "blocked", "blocked"]


async def test_setuid_programs_gain_nothing(provider: PythonProvider) -> None:
    code = """
import subprocess
for path in ('/usr/bin/su', '/usr/bin/passwd', '/bin/mount', '/usr/bin/newgrp'):
    if os.path.exists(path):
        r = subprocess.run([path], stdin=subprocess.DEVNULL, capture_output=True, timeout=5)
        print(r.returncode != 0 or 'ran')
print(os.statvfs('/usr/bin').f_flag & os.ST_NOSUID > 0)
"""
    text = (await run(provider, code)).text.split()
    assert text[-1] == "True"


async def test_process_limit_stops_a_fork_bomb(provider: PythonProvider) -> None:
    code = """
children = []
try:
    for _ in range(200):
        pid = os.fork()
        if pid == 0:
            signal.alarm(10); time.sleep(8); os._exit(0)
        children.append(pid)
except OSError as error:
    print('stopped', len(children), errno.errorcode[error.errno])
"""
    bomb, other = await asyncio.gather(run(provider, code, "bomb"), run(provider, "print(6 * 7)", "other"))
    word, count, code_name = bomb.text.split()[:3]
    assert (word, code_name) == ("stopped", "EAGAIN")
    assert int(count) < OPTIONS.processes
    assert other.text.strip() == "42"
    after = await run(provider, "print(processes())", "bomb")
    assert int(after.text) == 2  # the supervisor and the kernel: none outlived the call


async def test_inode_limit(provider: PythonProvider) -> None:
    code = """
made = 0
try:
    for i in range(20000):
        open(f'/tmp/{i}', 'w').close(); made += 1
except OSError as error:
    print(made, errno.errorcode[error.errno])
"""
    result = await run(provider, code)
    if LAUNCHER == "bubblewrap":  # its tmpfs knows no such limit; the supervisor counts
        assert f"used more than {OPTIONS.inodes} files" in result.text
    else:
        made, reason = result.text.split()[:2]
        assert int(made) < OPTIONS.inodes
        assert reason == "ENOSPC"


@pytest.mark.parametrize("directory", ["/mnt/data", "/tmp", "/dev/shm"])
async def test_scratch_limit(provider: PythonProvider, directory: str) -> None:
    code = f"""
block, written = bytes(1 << 20), 0
try:
    for i in range(256):
        with open(f'{directory}/{{i % 4}}', 'ab') as file: file.write(block)
        written += 1
except OSError as error:
    print(written, errno.errorcode[error.errno])
for i in range(4): os.path.exists(f'{directory}/{{i}}') and os.unlink(f'{directory}/{{i}}')
"""
    written, reason = (await run(provider, code)).text.split()[:2]
    assert int(written) <= OPTIONS.scratch_mib
    assert reason in ("ENOSPC", "EFBIG")


async def test_memory_limit_of_one_process(provider: PythonProvider) -> None:
    result = await run(provider, "b = [bytearray(64 << 20) for _ in range(16)]; print(len(b))")
    assert "MemoryError" in result.text
    assert result.error is not None


async def test_memory_limit_of_many_processes(provider: PythonProvider) -> None:
    """Each stays under its own limit; together they would be 1 GiB."""
    code = """
for _ in range(8):
    if os.fork() == 0:
        signal.alarm(10); held = bytearray(os.urandom(1) * (128 << 20)); time.sleep(8); os._exit(0)
time.sleep(8)
print('ESCAPED')
"""
    result = await run(provider, code)
    assert "ESCAPED" not in result.text
    assert result.error is not None
    assert result.error.type == "resource_limit"


async def test_socket_buffers_are_bounded(provider: PythonProvider) -> None:
    """Memory of the kernel's that belongs to no process: 16 processes with 400 sockets would hold 1.3 GiB."""
    code = """
for _ in range(16):
    if os.fork() == 0:
        signal.alarm(8); held = []
        try:
            for _ in range(200):
                held += socket.socketpair()
                held[-1].setblocking(False)
                try: held[-1].send(bytes(1 << 17))
                except BlockingIOError: pass
        except OSError: pass
        time.sleep(6); os._exit(0)
time.sleep(6)
print('ESCAPED')
"""
    result = await run(provider, code)
    assert "ESCAPED" not in result.text
    assert result.error is not None
    assert "open files" in result.text


async def test_nothing_survives_the_call(provider: PythonProvider) -> None:
    code = """
import threading
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for fd in range(3, 64):
            try: os.close(fd)
            except OSError: pass
        for _ in range(200):
            write('/mnt/data/daemon'); time.sleep(0.02)
    os._exit(0)
ticks = []
def tick():
    for _ in range(500): ticks.append(time.monotonic()); time.sleep(0.02)
threading.Thread(target=tick, daemon=True).start()
while not os.path.exists('/mnt/data/daemon'): time.sleep(0.01)
print(time.monotonic())
"""
    await run(provider, code, "daemon")
    await asyncio.sleep(0.5)  # what is measured: that nothing happens in this time
    after = """
pauses = [b - a for a, b in zip(ticks, ticks[1:] + [time.monotonic()])]
print(os.path.getsize('/mnt/data/daemon'), processes(), max(pauses))
"""
    size, processes, pause = (await run(provider, after, "daemon")).text.split()[:3]
    assert int(processes) == 2
    assert int(size) < 20
    assert float(pause) > 0.4  # the thread stood still between the calls


async def test_sees_no_other_conversation(provider: PythonProvider, host: Host) -> None:
    setup = f"""
for directory in ('/mnt/data', '/tmp', '/dev/shm', '/run'):
    open(directory + '/{host.secret}', 'w').write('{host.secret}')
listening = socket.socket(socket.AF_UNIX); listening.bind(chr(0) + 'other-{host.secret}'); listening.listen()
print('ready')
"""
    assert "ready" in (await run(provider, setup, "first")).text
    code = f"""
def connect():
    s = socket.socket(socket.AF_UNIX); s.connect(chr(0) + 'other-{host.secret}')
attempt('abstract', connect)
tops = ('/mnt', '/tmp', '/dev', '/run', '/var')
found = [os.path.join(d, n) for top in tops for d, _, names in os.walk(top) for n in names]
print('listed', len(found), any('{host.secret}' in f for f in found))
print('processes', processes())
"""
    text = await all_blocked(provider, code, 1)
    assert " False" in text
    assert "processes 2" in text


async def test_links_and_fifos_lead_the_server_nowhere(provider: PythonProvider, host: Host) -> None:
    code = f"""
os.symlink({str(host.model)!r}, '/mnt/data/model'); os.symlink('/etc', '/mnt/data/etc')
os.mkfifo('/mnt/data/fifo'); os.mkdir('/mnt/data/d'); open('/mnt/data/d/real.txt', 'w').write('real')
open(b'/mnt/data/odd-\\xff\\n..', 'w').write('odd')
"""
    result = await run(provider, code)
    files = [c for c in result.content if isinstance(c, File)]
    assert sorted(f.filename for f in files) == ["d/real.txt", "odd-?\n.."]
    for file in files:
        stored = await provider.read_file(file.container_id, file.file_id)
        assert stored is not None
        assert stored.data in (b"real", b"odd")


async def test_endless_message_cannot_grow_the_server(provider: PythonProvider) -> None:
    """Writes frames that never end to every connection the server reads; libzmq as a client would store them all."""
    code = """
import select
frames = bytes([1, 255]) + bytes(255)  # a frame of 255 bytes with more to follow
deadline, sent = time.monotonic() + 3, 0
fds = [fd for fd in os.listdir('/proc/self/fd') if open_fd(fd)]
sockets = [int(fd) for fd in fds if os.readlink(f'/proc/self/fd/{fd}').startswith('socket:')]
for fd in sockets: os.set_blocking(fd, False)
while time.monotonic() < deadline and sent < 512 << 20:
    for fd in sockets:
        try: sent += os.write(fd, frames * 1024)
        except OSError: pass
print(sent)
"""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident()
    result = await run(provider, code)
    assert result.error is not None
    assert resident() - before < 64 << 20
    assert (await run(provider, "print(6 * 7)")).text.strip() == "42"


async def test_forged_messages_are_data_only(provider: PythonProvider) -> None:
    """The program knows the signing key and can say anything; the server must neither crash nor hang nor trust it."""
    code = """
from ipykernel.kernelapp import IPKernelApp
app = IPKernelApp.instance(); parent = app.kernel.get_parent('shell')
for kind, content in (('stream', {'text': 7}), ('stream', []), ('error', {}), ('display_data', {'data': 'x'}),
                      ('display_data', {'data': {'image/png': 5}}), ('execute_result', None), ('status', [])):
    app.session.send(app.iopub_socket, kind, content, parent=parent)
app.iopub_socket.send_multipart([b'x'] * 5)
app.iopub_socket.send_multipart([b'<IDS|MSG>', b'', b'{', b'[', b'"', b'nan'])
print('said')
"""
    result = await run(provider, code, "forge")
    assert "said" in result.text or result.error is not None
    assert "42" in (await run(provider, "print(42)", "forge")).text
