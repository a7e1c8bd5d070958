"""Forged messages of a program in the sandbox: the server must neither trust them nor fail."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.loop_watch import shortest_pause
from tests.tools.sandbox.attempts import resident, run
from vllm_gptoss.tools.confined import pool
from vllm_gptoss.tools.python import PythonProvider

pytestmark = [pytest.mark.namespaces, pytest.mark.asyncio(loop_scope="module")]


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
    before = resident()
    result = await run(provider, code)
    assert "sent a message of more than" in result.error.message
    assert resident() - before < 64 << 20
    assert (await run(provider, "print(6 * 7)")).text.strip() == "42"


FORGE = """
kernel = get_ipython().kernel; session = kernel.session; iopub = kernel.iopub_socket
parent = kernel.get_parent('shell')['header']
def signed(header, parent, content, metadata={}):
    parts = [json.dumps(p, default=str).encode() for p in (header, parent, metadata)]
    parts.append(content if isinstance(content, bytes) else json.dumps(content).encode())
    return [b'topic', b'<IDS|MSG>', session.sign(parts), *parts]
def forge(header, parent, content): iopub.send_multipart(signed(header, parent, content))
"""
FORGED = {
    "delimiter": "iopub.send_multipart([b'<IDS|MSG>'])",
    "few parts": "iopub.send_multipart([b'x', b'<IDS|MSG>', b'', b'{}'])",
    "not signed": "iopub.send_multipart([b'<IDS|MSG>', b'', b'{', b'[', b'nan', b''])",
    "no frames": "iopub.send_multipart([b''] * 40)",
    "parent list": "forge({'msg_type': 'stream'}, [], {'name': 'stdout', 'text': 'x'})",
    "parent id": "forge({'msg_type': 'stream'}, {'msg_id': [1]}, {'text': 'x'})",
    "header list": "forge([], parent, {'text': 'x'})",
    "no type": "forge({}, parent, {'text': 'x'})",
    "type list": "forge({'msg_type': ['status']}, parent, {'execution_state': 'idle'})",
    "status list": "forge({'msg_type': 'status'}, parent, [])",
    "status null": "forge({'msg_type': 'status'}, parent, {'execution_state': None})",
    "stream number": "forge({'msg_type': 'stream'}, parent, {'text': 7})",
    "stream list": "forge({'msg_type': 'stream'}, parent, ['text'])",
    "error": "forge({'msg_type': 'stream'}, parent, {'traceback': 5})",
    "data": "forge({'msg_type': 'display_data'}, parent, {'data': 'x'})",
    "image": "forge({'msg_type': 'display_data'}, parent, {'data': {'image/png': [5]}})",
    "deep": "forge({'msg_type': 'display_data'}, parent, b'{\"data\": ' + b'[' * 50_000 + b']' * 50_000 + b'}')",
    "not JSON": "forge({'msg_type': 'display_data'}, parent, b'{\\xff')",
    "null": "forge({'msg_type': 'execute_result'}, parent, None)",
    "surrogate": "forge({'msg_type': 'stream'}, parent, b'{\"text\": \"\\\\ud800\"}')",
}


@pytest.mark.parametrize("name", FORGED)
async def test_forged_outputs_are_data_only(provider: PythonProvider, name: str) -> None:
    """The program knows the signing key and can send anything; the server must neither crash nor hang nor trust it."""
    result = await run(provider, f"{FORGE}\n{FORGED[name]}\nkept = 42\nprint('said')", "forge")
    assert result.error is None, result.text
    assert "said" in result.text
    assert (await run(provider, "print(kept)", "forge")).text.strip() == "42"


REPLIES = {
    "payload": {"status": "ok", "payload": [1]},
    "payload text": {"status": "ok", "payload": "ask_exit"},
    "list": [],
    "null": None,
    "names": {"status": "error", "ename": [], "evalue": {}},
}


@pytest.mark.parametrize("name", REPLIES)
async def test_a_forged_end_of_a_call_stops_the_program(provider: PythonProvider, name: str) -> None:
    """A program that reports its end but continues is stopped until the next call, after any reply."""
    code = f"""{FORGE}
import threading
def tick():
    for _ in range(1000): write('/mnt/data/ticks'); time.sleep(0.01)
threading.Thread(target=tick, daemon=True).start()
while not os.path.exists('/mnt/data/ticks'): time.sleep(0.01)
forge({{'msg_type': 'status'}}, parent, {{'execution_state': 'idle'}})
ident = kernel._parent_ident['shell']
frames = signed({{'msg_type': 'execute_reply'}}, parent, {REPLIES[name]!r})
kernel.shell_stream.socket.send_multipart([*ident, *frames[1:]])
write('/mnt/data/went on')
end = time.monotonic() + 8
while time.monotonic() < end: write('/mnt/data/after'); time.sleep(0.01)
"""
    conversation = f"ghost {name}"
    async with asyncio.timeout(15):
        await run(provider, code, conversation)
    container = provider._containers[conversation]
    assert not container._needs_kernel, "nothing would run because it was killed"
    sandbox = container._kernel.sandbox

    async def size() -> int:
        return sum(one[1] for one in await sandbox.list_files() if one[0] in ("ticks", "after"))

    before = await size()
    assert before
    for _ in range(10):
        await asyncio.sleep(0.05)
        assert await size() == before


RAW = """
deadline, sent = time.monotonic() + 4, 0
fds = [fd for fd in os.listdir('/proc/self/fd') if open_fd(fd)]
sockets = [int(fd) for fd in fds if os.readlink(f'/proc/self/fd/{fd}').startswith('socket:')]
for fd in sockets: os.set_blocking(fd, False)
while time.monotonic() < deadline and sent < 64 << 20:
    for fd in sockets:
        try: sent += os.write(fd, FRAMES)
        except OSError: pass
time.sleep(0.5)
print(sent)
"""


TINY = {
    "messages": (b"\0\0", "sends what are no messages"),
    "commands": (b"\4\0", "sends commands alone"),
    "parts": (b"\1\0", "sent a message of more than"),
}


@pytest.mark.alone
@pytest.mark.parametrize("name", TINY)
async def test_tiny_frames_do_not_take_the_event_loop(provider: PythonProvider, name: str) -> None:
    """Two bytes a frame, as fast as they can be written: the loop belonged to them for as long as the call ran."""
    frame, said = TINY[name]
    pause, result = await shortest_pause(lambda: run(provider, f"FRAMES = {frame!r} * 16384\n{RAW}"), 0.1)
    assert pause < 0.1
    # Unread parts count as the cage's memory, and that limit may come first: the kernel is killed, or
    # its ZeroMQ gives up.
    ends = said in result.error.message or result.error.type == "resource_limit" or "signal 6" in result.error.message
    assert ends if name == "parts" else said in result.error.message
    assert "42" in (await run(provider, "print(42)")).text


@pytest.mark.alone
async def test_a_message_whose_tree_would_be_huge_is_not_built_here(provider: PythonProvider) -> None:
    """Nested lists in 12 MB: 3.6 s and 812 MiB."""
    code = """
tree = b'{"data": {"application/json": [' + b'[],' * 4_000_000 + b'[]]}}'
forge({'msg_type': 'display_data'}, parent, tree)
print('said')
"""
    await pool().start()
    before = resident()
    pause, result = await shortest_pause(lambda: run(provider, FORGE + code), 0.1)
    assert result.text.startswith("[[]"), "it was read, elsewhere"
    assert "said" in result.text
    assert pause < 0.1
    assert resident() - before < 160 << 20
    assert "42" in (await run(provider, "print(42)")).text
