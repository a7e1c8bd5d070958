"""The tool's description holds: a stateful notebook that echoes, plots, stores files, and reports errors."""

from __future__ import annotations

import asyncio
import secrets
import tempfile
import time
from contextlib import aclosing
from pathlib import Path

import pytest

from tests.support.notebooks import run_in, started
from vllm_gptoss.tools.protocol import File, Image, SessionOptions, Text, ToolCall
from vllm_gptoss.tools.python import PythonOptions, PythonProvider

DOCUMENT = Path(__file__).parents[3] / "docs" / "security.md"

pytestmark = [pytest.mark.namespaces, pytest.mark.asyncio(loop_scope="module")]


async def test_prompt_says_what_the_model_was_trained_on(provider: PythonProvider) -> None:
    import openai_harmony as harmony

    (namespace,) = PythonProvider(PythonOptions()).namespaces()
    trained = harmony.ToolNamespaceConfig.python()
    assert (namespace.name, namespace.description) == (trained.name, trained.description)
    assert "after 10.0 seconds" in provider.namespaces()[0].description


async def test_state_over_two_calls(provider: PythonProvider) -> None:
    first = await run_in(provider, "x = 41", "state")
    second = await run_in(provider, "x + 1", "state")
    assert (first.error, second.error) == (None, None)
    assert second.text.strip() == "42"
    assert first.container_id == second.container_id


async def test_a_session_knows_its_container_before_the_first_call(provider: PythonProvider) -> None:
    """A client gets an event before the call has run, and some store that first event."""
    session = await provider.open("known", SessionOptions())
    known = session.container_id
    code = [ToolCall(number, "python", None, number) for number in "12"]
    assert [(await session.call(call)).container_id for call in code] == [known, known]
    assert session.container_id == known
    await provider.forget("known")
    assert session.container_id not in ("", known), "another container has another id"


async def test_two_conversations_do_not_share_state(provider: PythonProvider) -> None:
    await run_in(provider, "x = 1", "one")
    result = await run_in(provider, "x", "two")
    assert "NameError" in result.text


async def test_random_numbers_differ_between_conversations(provider: PythonProvider) -> None:
    """Conversations are forks of one process; they must not share its generators' state."""
    code = "import random, numpy; print(random.random(), numpy.random.rand())"
    assert (await run_in(provider, code)).text != (await run_in(provider, code)).text


async def test_what_is_shown_below_the_scratch_space_stays_there_and_stays_read_only() -> None:
    """An example is a virtual environment in /tmp: the private /tmp must not hide the interpreter's own modules."""
    with tempfile.TemporaryDirectory(dir="/tmp") as host:
        Path(host, "data").mkdir()
        Path(host, "data", "note").write_text("from the host")
        Path(host, "secret").write_text("not shown")
        async with aclosing(await started(read_only_paths=[Path(host, "data")])) as provider:
            read = await run_in(provider, f"open('{host}/data/note').read()")
            listed = await run_in(provider, f"import os; os.listdir('{host}')")
            wrote = await run_in(provider, f"open('{host}/data/note', 'w')")
            mine = f"/tmp/{secrets.token_hex(8)}"
            private = await run_in(provider, f"open('{mine}', 'w').write('x')")
        assert read.text.strip() == "'from the host'"
        assert listed.text.strip() == "['data']"
        assert "Read-only file system" in wrote.text
        assert private.error is None
        assert not Path(mine).exists()


async def test_exception_is_told_with_its_traceback(provider: PythonProvider) -> None:
    result = await run_in(provider, "print('before')\n1 / 0")
    assert result.text.startswith("before")
    assert "ZeroDivisionError: division by zero" in result.text
    assert "\x1b" not in result.text
    assert (result.error.type, result.error.message) == ("tool_failed", "ZeroDivisionError: division by zero")


async def test_plot_is_an_image_with_a_description(provider: PythonProvider) -> None:
    result = await run_in(provider, "import matplotlib.pyplot as plt\nplt.plot([1, 2, 4]); plt.title('t')\nplt.show()")
    (image,) = [c for c in result.content if isinstance(c, Image)]
    assert image.media_type == "image/png"
    assert image.data.startswith(b"\x89PNG")
    assert image.alt.startswith("[image: image/png, ")
    assert "Figure size 640x480" in image.alt


async def test_file_in_data_is_listed_once_and_downloadable(provider: PythonProvider) -> None:
    result = await run_in(provider, "open('/mnt/data/table.csv', 'w').write('a,b\\n1,2\\n')", "files")
    (file,) = [c for c in result.content if isinstance(c, File)]
    assert (file.filename, file.bytes, file.container_id) == ("table.csv", 8, result.container_id)
    stored = await provider.read_file(file.container_id, file.file_id)
    assert (stored.data, stored.media_type, stored.filename) == (b"a,b\n1,2\n", "text/csv", "table.csv")
    assert (await provider.list_files(file.container_id))[0].file_id == file.file_id
    unchanged = await run_in(provider, "1", "files")
    assert not [c for c in unchanged.content if isinstance(c, File)]
    changed = await run_in(provider, "open('/mnt/data/table.csv', 'a').write('3,4\\n')", "files")
    assert [c.bytes for c in changed.content if isinstance(c, File)] == [12]


async def test_many_files_do_not_slow_every_call(provider: PythonProvider) -> None:
    """15,000 files took 4 to 6 s of each call: all of them were looked at for every 64 that were listed."""
    await run_in(provider, "for n in range(15_000): open(f'/mnt/data/{n}', 'w').close()", "many")
    times = []
    for _ in range(3):
        began = time.monotonic()
        await run_in(provider, "1", "many")
        times.append(time.monotonic() - began)
    await provider.forget("many")
    assert min(times) < 2.0, times


async def test_file_of_another_container_is_not_handed_out(provider: PythonProvider) -> None:
    result = await run_in(provider, "open('/mnt/data/x', 'w').write('x')")
    (file,) = [c for c in result.content if isinstance(c, File)]
    assert await provider.read_file("cntr_" + secrets.token_hex(16), file.file_id) is None
    assert await provider.read_file(file.container_id, "cfile_../../etc/passwd") is None


async def test_output_of_programs_and_forked_children_is_seen(provider: PythonProvider) -> None:
    code = """
import os, subprocess, sys
subprocess.run(['echo', 'from a program'])
!echo from the shell
if os.fork() == 0:
    print('from a child', flush=True); os._exit(0)
os.wait()
command = [sys.executable, '-c', 'import numpy; print(numpy.arange(3).sum())']
print(subprocess.run(command, capture_output=True, text=True).stdout)
"""
    text = (await run_in(provider, code)).text
    assert all(words in text for words in ("from a program", "from the shell", "from a child", "3\n"))


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import sympy; sympy.integrate(sympy.Symbol('x'), (sympy.Symbol('x'), 0, 2))", "2"),
        ("import numpy as np; float(np.linalg.det(np.eye(3)))", "1.0"),
        ("import pandas as pd; int(pd.DataFrame({'a': [1, 2]}).a.sum())", "3"),
        (
            "import multiprocessing as mp\nwith mp.get_context('fork').Pool(2) as pool: print(pool.map(abs, [-1, 2]))",
            "[1, 2]",
        ),
        ('{"code": "print(6 * 7)"}', "42"),
        ('{"code": 1, "x": 2}', "{'code': 1, 'x': 2}"),
        ("```python\nprint(6 * 7)\n```", "42"),
        ("\n```py\nprint(6 * 7)\n  ```\n", "42"),
        ("```\nprint(6 * 7)", "42"),
        ("print('''\n```\n'''.strip())", "```"),
    ],
)
async def test_code_is_run_with_the_libraries_of_the_extra_in_json_and_in_a_fence(
    provider: PythonProvider, code: str, expected: str
) -> None:
    assert (await run_in(provider, code)).text.strip() == expected


@pytest.mark.parametrize(
    ("code", "error"), [("def f(:", "SyntaxError"), ("input('name? ')", "StdinNotImplementedError")]
)
async def test_what_cannot_run_is_told_at_once(provider: PythonProvider, code: str, error: str) -> None:
    assert error in (await run_in(provider, code)).text


@pytest.mark.parametrize("code", ["", " \n", "#" * (1 << 20) + "#"])
async def test_no_code_and_too_much_code_are_refused(provider: PythonProvider, code: str) -> None:
    result = await run_in(provider, code)
    assert result.error.type == "invalid_arguments"


async def test_exit_is_told_as_a_loss(provider: PythonProvider) -> None:
    await run_in(provider, "x = 1; open('/mnt/data/kept', 'w').write('k')", "exit")
    assert "All variables are lost; files in /mnt/data are kept" in (await run_in(provider, "exit()", "exit")).text
    after = await run_in(provider, "print(open('/mnt/data/kept').read(), 'x' in globals())", "exit")
    assert after.text.strip() == "k False"


async def test_results_say_nothing_when_there_is_nothing(provider: PythonProvider) -> None:
    assert (await run_in(provider, "y = 1")).content == [Text("(no output)")]


@pytest.mark.alone
async def test_pool_has_a_kernel_ready_under_one_second() -> None:
    """From the pool it is some milliseconds; 1 s is what the issue promises, on a shared CI machine."""
    async with aclosing(await started(warm=1)) as provider:
        begin = time.monotonic()
        result = await run_in(provider, "1 + 1")
        elapsed = time.monotonic() - begin
        assert result.text.strip() == "2"
        assert elapsed < 1.0


async def test_call_of_another_session_of_the_conversation_waits_its_turn(provider: PythonProvider) -> None:
    session = await provider.open("turn", SessionOptions())
    other = await provider.open("turn", SessionOptions())
    code = "n = globals().get('n', 0) + 1; import time; time.sleep(0.1); print(n)"
    both = await asyncio.gather(*(s.call(ToolCall("c", "python", None, code)) for s in (session, other)))
    assert sorted(r.text.strip() for r in both) == ["1", "2"]


async def test_nameless_conversation_is_private_and_ends_with_its_session(provider: PythonProvider) -> None:
    session, other = [await provider.open("", SessionOptions()) for _ in range(2)]
    try:
        await session.call(ToolCall("c", "python", None, "x = 41"))
        assert (await session.call(ToolCall("c", "python", None, "x + 1"))).text.strip() == "42"
        assert "NameError" in (await other.call(ToolCall("c", "python", None, "x"))).text
        named = len(provider._containers)
    finally:
        await session.aclose()
        await other.aclose()
    assert len(provider._containers) == named - 2


async def test_every_option_is_documented() -> None:
    text = DOCUMENT.read_text()
    assert [name for name in PythonOptions.model_fields if f"| `{name}` |" not in text] == []
