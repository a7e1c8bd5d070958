"""Limits of a program in the sandbox: processes, memory, files, kernel memory, and time between its calls."""

from __future__ import annotations

import asyncio
import os

import pytest

from tests.tools.sandbox.attempts import LAUNCHER, OPTIONS, all_blocked, run
from vllm_gptoss.tools.python import PythonProvider

pytestmark = [pytest.mark.namespaces, pytest.mark.asyncio(loop_scope="module")]


async def stopped(provider: PythonProvider, code: str, said: str) -> None:
    """A program is stopped before its last line, which prints ESCAPED; the error contains `said`.

    The sandbox repeats a slow count after twenty times its duration, or five seconds.
    """
    result = await run(provider, code)
    assert "ESCAPED" not in result.text
    assert result.error is not None
    assert said in result.text


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
    await run(provider, "x = 41", "bomb of memory")
    result = await run(provider, "b = [bytearray(64 << 20) for _ in range(16)]; print(len(b))", "bomb of memory")
    assert "MemoryError" in result.text
    assert result.error is not None
    assert (await run(provider, "print(x + 1)", "bomb of memory")).text.strip() == "42"


async def test_memory_limit_of_many_processes(provider: PythonProvider) -> None:
    """Each stays under its own limit; together they would be 1 GiB."""
    code = """
for _ in range(8):
    if os.fork() == 0:
        signal.alarm(10); held = bytearray(os.urandom(1) * (128 << 20)); time.sleep(8); os._exit(0)
time.sleep(8)
print('ESCAPED')
"""
    result = await run(provider, code, "family")
    assert "ESCAPED" not in result.text
    assert result.error.type == "resource_limit"
    assert f"{OPTIONS.memory_mib} MiB of memory" in result.text
    assert (await run(provider, "print(40 + 2)", "family")).text.strip() == "42"


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
    await stopped(provider, code, "open files")


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
    before = (await run(provider, "print(os.path.getsize('/mnt/data/daemon'))", "daemon")).text.split()[0]
    await asyncio.sleep(0.5)  # what is measured: that nothing happens in this time
    after = """
pauses = [b - a for a, b in zip(ticks, ticks[1:] + [time.monotonic()])]
print(os.path.getsize('/mnt/data/daemon'), processes(), max(pauses))
"""
    size, processes, pause = (await run(provider, after, "daemon")).text.split()[:3]
    assert int(processes) == 2
    assert size == before
    assert float(pause) > 0.4  # the thread was stopped between the calls


async def test_memory_that_nothing_counts_cannot_be_had(provider: PythonProvider) -> None:
    """Shared anonymous memory, dropped from the page tables: 700 MiB were held under a limit of 128."""
    code = """
import mmap
def held(fd, flags, prot=mmap.PROT_READ | mmap.PROT_WRITE):
    memory = mmap.mmap(fd, 64 << 20, flags=flags, prot=prot)
    memory.write(b'x' * (64 << 20)); memory.madvise(mmap.MADV_DONTNEED)
    return memory
zero = os.open('/dev/zero', os.O_RDONLY)
validate = 3
attempt('shared', held, -1, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
attempt('validate', held, -1, validate | mmap.MAP_ANONYMOUS)
attempt('writable zero', os.open, '/dev/zero', os.O_RDWR)
attempt('zero', held, zero, mmap.MAP_SHARED)
before = [line for line in read('/proc/self/status').decode().splitlines() if line.startswith('RssShmem')]
page = mmap.mmap(zero, 8 << 20, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
sum(page[at] for at in range(0, 8 << 20, 4096))
after = [line for line in read('/proc/self/status').decode().splitlines() if line.startswith('RssShmem')]
print('same', before == after)
private = mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS); private.write(b'x')
with open('/dev/shm/counted', 'w+b') as file:
    file.truncate(1 << 20); mmap.mmap(file.fileno(), 1 << 20).write(b'x')
os.unlink('/dev/shm/counted')
"""
    assert "same True" in await all_blocked(provider, code, 4)


async def test_locks_are_bounded(provider: PythonProvider) -> None:
    """Each takes 0.2 KiB of the kernel's, which no other limit counts: millions could be had in a call."""
    code = """
import fcntl, struct
for number in range(4):
    if os.fork() == 0:
        signal.alarm(19)
        for file in range(100):
            held = os.open(f'/mnt/data/{number}-{file}', os.O_CREAT | os.O_RDWR)
            for at in range(300):  # many files: the kernel looks through all locks of one
                fcntl.fcntl(held, fcntl.F_SETLK, struct.pack('hhqqi4x', fcntl.F_WRLCK, 0, at * 2, 1, 0))
        time.sleep(17); os._exit(0)
time.sleep(17)
print('ESCAPED')
"""
    await stopped(provider, code, "65536 locks on files")


async def test_locks_that_programs_take_are_there(provider: PythonProvider) -> None:
    code = """
import fcntl, sqlite3
with sqlite3.connect('/mnt/data/x.db') as db: db.execute('create table t (x)'); db.execute('insert into t values (6*7)')
with open('/mnt/data/lock', 'w') as file: fcntl.flock(file, fcntl.LOCK_EX); fcntl.lockf(file, fcntl.LOCK_EX)
print(sqlite3.connect('/mnt/data/x.db').execute('select x from t').fetchone())
"""
    assert (await run(provider, code)).text.strip().startswith("(42,)")


async def test_pieces_of_address_space_are_bounded(provider: PythonProvider) -> None:
    """Like locks, mappings are counted: 48 processes could have 65,530 each, 0.6 GiB."""
    code = """
libc.mmap.restype = ctypes.c_void_p
for _ in range(6):
    if os.fork() == 0:
        signal.alarm(19)
        size = 40_000 * 4096
        start = libc.mmap(None, ctypes.c_size_t(size), 0, 0x22, -1, 0)  # MAP_PRIVATE | MAP_ANONYMOUS, untouched
        for at in range(0, size, 8192): libc.mprotect(ctypes.c_void_p(start + at), ctypes.c_size_t(4096), 1)
        time.sleep(17); os._exit(0)
time.sleep(17)
print('ESCAPED')
"""
    await stopped(provider, code, "131072 memory mappings")


WAKERS = {
    "child": """
me = os.getpid()
for _ in range(4):
    if os.fork() == 0:
        signal.alarm(20)
        while True:
            try: os.kill(me, signal.SIGCONT)
            except OSError: pass
""",
    "thread": """
import threading
def wake():
    while True: os.kill(os.getpid(), signal.SIGCONT)
for _ in range(2): threading.Thread(target=wake, daemon=True).start()
""",
    "timer": """
event = ctypes.create_string_buffer(64)
ctypes.c_int.from_buffer(event, 8).value = signal.SIGCONT  # sigev_signo; sigev_notify 0 is SIGEV_SIGNAL
timer = ctypes.c_int()
assert libc.syscall(ctypes.c_long(222), 1, event, ctypes.byref(timer)) == 0
every = (ctypes.c_long * 4)(0, 20_000_000, 0, 20_000_000)
assert libc.syscall(ctypes.c_long(223), timer, 0, every, None) == 0
""",
}


@pytest.mark.parametrize("waker", WAKERS)
async def test_nothing_wakes_a_program_between_calls(provider: PythonProvider, waker: str) -> None:
    """SIGCONT from a child, a thread or a timer let a program run on, unwatched."""
    if waker == "timer" and os.uname().machine != "x86_64":
        pytest.skip("the numbers are x86_64's")
    code = f"""
signal.signal(signal.SIGCONT, signal.SIG_IGN)
import threading
def tick():
    for _ in range(2000):
        with open('/mnt/data/ticks', 'ab') as file: file.write(b'x')
threading.Thread(target=tick, daemon=True).start()
while not os.path.exists('/mnt/data/ticks'): time.sleep(0.01)
{WAKERS[waker]}
print('armed')
"""
    conversation = f"waker {waker}"
    assert "armed" in (await run(provider, code, conversation)).text
    container = provider._containers[conversation]
    sandbox = container._kernel.sandbox

    async def ticks() -> int:
        return next((one[1] for one in await sandbox.list_files() if one[0] == "ticks"), 0)

    await asyncio.sleep(0.3)  # a program that is woken is killed within the supervisor's next turn
    before = await ticks()
    assert before
    for _ in range(10):
        await asyncio.sleep(0.05)
        assert await ticks() == before
    assert "42" in (await run(provider, "print(42)", conversation)).text
