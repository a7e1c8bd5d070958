"""What a program in the sandbox must not be able to do, tried for real.

Every attempt is bounded in size and time, so that it could not hurt the machine if a wall were missing, and nothing is
sent to an address off this machine. Runs as the current user; `test_escape_as_user` does so as an ordinary user.
"""

from __future__ import annotations

import json
import os
import resource
import socket
import sys
from pathlib import Path

import psutil
import pytest

from tests.tools.sandbox.attempts import LAUNCHER, OPTIONS, SHOWS_TMP, Host, all_blocked, run
from vllm_gptoss.tools.protocol import File
from vllm_gptoss.tools.python import PythonProvider
from vllm_gptoss.tools.sandbox import cage, landlock, launcher
from vllm_gptoss.tools.sandbox.spec import INSIDE_ID

pytestmark = [pytest.mark.namespaces, pytest.mark.asyncio(loop_scope="module")]


def program_of(provider: PythonProvider, conversation: str) -> psutil.Process:
    """The conversation's program, as the host sees it."""
    kernel = provider._containers[conversation]._kernel
    (program,) = psutil.Process(launcher._pid_of(kernel.sandbox._pidfd)).children()
    return program


async def test_is_another_user_of_the_host_in_namespaces_of_its_own(provider: PythonProvider) -> None:
    """The rings themselves: what they hide is tried below, where one wall may replace another."""
    for name in ("one", "two"):
        await run(provider, "1", name)
    programs = [program_of(provider, name) for name in ("one", "two")]
    mine = OPTIONS.run_as_uid if os.getuid() == 0 and cage.is_mapped("uid", OPTIONS.run_as_uid) else os.getuid()
    assert {uid for program in programs for uid in program.uids()} == {mine}
    for kind in ("user", "mnt", "pid", "net", "ipc", "uts", "cgroup"):
        seen = {os.readlink(f"/proc/{pid}/ns/{kind}") for pid in ("self", *(program.pid for program in programs))}
        assert len(seen) == 3, kind


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


@pytest.mark.parametrize("package", ["pip", "debugpy", "jedi", "parso"])
async def test_a_hidden_package_has_no_files_and_cannot_be_imported(provider: PythonProvider, package: str) -> None:
    """pip by `hidden_paths`; the others are dependencies that no kernel imports."""
    folder = OPTIONS.hidden_paths[0].with_name(package)
    assert folder.is_dir()
    code = f"""
import subprocess
print(os.listdir({str(folder)!r}))
try: import {package}
except ImportError: print('refused')
child = subprocess.run([sys.executable, '-c', 'import {package}'], capture_output=True, text=True)
print(child.stderr.splitlines()[-1])
"""
    result = await run(provider, code)
    missing = f"ModuleNotFoundError: {package} is hidden in this sandbox"
    assert result.text.splitlines() == ["['__init__.py']", "refused", missing]
    works = "import IPython.core.interactiveshell, ipykernel.kernelapp"
    result = await run(provider, f"import subprocess; subprocess.run([sys.executable, '-c', {works!r}], check=True)")
    assert result.error is None, result.text


async def test_inherits_no_descriptor(provider: PythonProvider, host: Host) -> None:
    code = """
fds = [fd for fd in os.listdir('/proc/self/fd') if open_fd(fd)]
links = [os.readlink(f'/proc/self/fd/{fd}') for fd in fds]
def kind(fd):
    with socket.socket(fileno=os.dup(int(fd))) as s: return s.type
sockets = [kind(fd) for fd, link in zip(fds, links) if link.startswith('socket:')]
print(json.dumps([links, sockets]))
"""
    links, sockets = json.loads((await run(provider, code)).text)
    kinds = ("socket:", "pipe:", "anon_inode:", "/dev/null", "/run/", "/mnt/data", "/proc/")
    assert links
    assert not [link for link in links if not link.startswith(kinds)]
    # Its own are streams; the server, the fork server and the supervisor talk by packets.
    assert set(sockets) == {socket.SOCK_STREAM}


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
    assert uid.split() == [str(INSIDE_ID)] * 4
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


async def test_what_is_shown_of_the_host_is_read_only(provider: PythonProvider, host: Host) -> None:
    """Everybody may write there, but for the mount and landlock."""
    shown = host.shown if SHOWS_TMP else Path(sys.prefix)
    code = f"""
print('seen', os.listdir({str(shown)!r}) != [], os.statvfs({str(shown)!r}).f_flag & os.ST_RDONLY > 0)
attempt('make', write, '{shown}/x'); attempt('change', write, {str(host.shown / "sample.csv")!r})
attempt('remove', os.unlink, {str(host.shown / "sample.csv")!r}); attempt('mode', os.chmod, {str(shown)!r}, 0o700)
"""
    assert "seen True True" in await all_blocked(provider, code, 4)
    assert host.shown.stat().st_mode & 0o777 == 0o777


async def test_landlock_holds_where_the_mount_and_the_mode_let_through(provider: PythonProvider) -> None:
    if not landlock.abi():
        return  # docs/security.md has the consequences
    await all_blocked(provider, "attempt('zero', os.open, '/dev/zero', os.O_RDWR)", 1)


_TABLE = """
    ptrace-attach 101 16 1 0 0, process_vm_readv 310 1 0 0 0 0 0, process_vm_writev 311 1 0 0 0 0 0,
    pidfd_getfd 438 0 0 0, kcmp 312 1 1 0 0 0, mount 165 0 0 0 0 0, umount2 166 0 0, pivot_root 155 0 0, chroot 161 0,
    open_tree 428 0 0 0, move_mount 429 0 0 0 0 0, fsopen 430 0 0, mount_setattr 442 0 0 0 0 0,
    unshare-user 272 0x10000000, unshare-net 272 0x40000000, setns 308 0 0, clone-user 56 0x10000011 0 0 0 0,
    clone3 435 0 0, init_module 175 0 0 0, finit_module 313 0 0 0, delete_module 176 0 0, kexec_load 246 0 0 0 0,
    reboot 169 0 0 0 0, swapon 167 0 0, bpf 321 0 0 0, perf_event_open 298 0 0 -1 -1 0, userfaultfd 323 0,
    io_uring_setup 425 1 0, io_uring_enter 426 0 0 0 0 0 0, keyctl 250 0 0 0 0 0, add_key 248 0 0 0 0 0,
    request_key 249 0 0 0 0, open_by_handle_at 304 0 0 0, name_to_handle_at 303 0 0 0 0 0, fanotify_init 300 0 0,
    quotactl 179 0 0 0 0, acct 163 0, syslog 103 2 0 0, iopl 172 3, ioperm 173 0 1 1, modify_ldt 154 0 0 0,
    settimeofday 164 0 0, sethostname 170 0 0, personality 135 0x40000, memfd_create 319 0 0, memfd_secret 447 0,
    shmget 29 0 4096 896, msgget 68 0 896, mq_open 240 0 0 0 0, sched_setaffinity 203 0 0 0, seccomp 317 1 0 0,
    setuid 105 0, thread-with-own-files 56 0x10000 0 0 0 0, inotify_init 253, inotify_init1 294 0,
    inotify_add_watch 254 0 0 0, inotify_rm_watch 255 0 0, fanotify_mark 301 0 0 0 0 0, unknown 999 0
"""
X86_64_CALLS = {name: [int(number, 0) for number in call] for name, *call in map(str.split, _TABLE.split(","))}


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
private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
page = mmap.mmap(-1, 4096, flags=private, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
page.write(b'\\xb8\\x14\\0\\0\\0\\xcd\\x80\\xc3')  # mov eax, 20 (getpid of i386); int 0x80; ret
i386 = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
x32 = lambda: libc.syscall(ctypes.c_long(0x40000000 | 39))
print(in_child(i386) == -signal.SIGSYS, in_child(x32) == -signal.SIGSYS)
"""
    assert (await run(provider, code)).text.strip() == "True True"


async def test_cannot_touch_its_supervisor(provider: PythonProvider) -> None:
    code = """
import resource
def prctl(*words):
    if libc.prctl(*[ctypes.c_ulong(word) for word in words]): raise OSError(ctypes.get_errno(), '')
kept = 42
attempt('hide', prctl, 4, 0)
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
    assert result.text.count("blocked ") == 9, result.text
    assert "alive" in result.text
    assert (await run(provider, "print(kept)", "touch")).text.strip() == "42"  # the same cage


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
    limit = 1 if resource.getrlimit(resource.RLIMIT_CORE)[1] else 0  # an outer hard limit of 0 cannot be raised
    assert result.text.split("\n")[:3] == [f"({limit}, {limit})", "blocked", "blocked"]


SETUID = {
    "/usr/bin/su": ["-c", "id"],
    "/usr/bin/passwd": ["-l", "root"],
    "/bin/mount": ["-t", "tmpfs", "none", "/mnt/data"],
    "/usr/bin/newgrp": ["root"],
}


async def test_setuid_programs_gain_nothing(provider: PythonProvider) -> None:
    code = (
        f"SETUID = {SETUID!r}"
        + """
import subprocess
for path, words in SETUID.items():
    if os.path.exists(path):
        r = subprocess.run([path, *words], stdin=subprocess.DEVNULL, capture_output=True, timeout=5)
        print('blocked' if r.returncode else 'ESCAPED', path)
print(os.statvfs('/usr/bin').f_flag & os.ST_NOSUID > 0)
"""
    )
    text = (await run(provider, code)).text
    assert "ESCAPED" not in text
    assert text.count("blocked") == sum(map(os.path.exists, SETUID))
    assert text.split()[-1] == "True"


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


async def test_shared_files_tell_and_hold_nothing_but_locks(provider: PythonProvider) -> None:
    """File operations through which two conversations could see each other; resized pipes use up the user's pages."""
    code = """
import fcntl, struct
file = os.open(os.__file__, os.O_RDONLY); folder = os.open(os.path.dirname(os.__file__), os.O_RDONLY)
F_OFD_SETLK, F_NOTIFY, F_SETPIPE_SZ, F_SET_RW_HINT, DN_ACCESS = 37, 1026, 1031, 1036, 1
attempt('lease', fcntl.fcntl, file, fcntl.F_SETLEASE, fcntl.F_RDLCK)
attempt('notify', fcntl.fcntl, folder, F_NOTIFY, DN_ACCESS)
attempt('hint', fcntl.fcntl, file, F_SET_RW_HINT, struct.pack('q', 2))
attempt('open lock', fcntl.fcntl, file, F_OFD_SETLK, struct.pack('hhqqi4x', fcntl.F_RDLCK, 0, 0, 0, 0))
attempt('pipe', fcntl.fcntl, os.pipe()[0], F_SETPIPE_SZ, 1 << 20)
attempt('write lock', fcntl.fcntl, file, fcntl.F_SETLK, struct.pack('hhqqi4x', fcntl.F_WRLCK, 0, 0, 0, 0))
"""
    text = await all_blocked(provider, code, 6)
    assert {line.split()[-1] for line in text.splitlines()[:5]} == {"EINVAL"}


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
        assert stored.data in (b"real", b"odd")
