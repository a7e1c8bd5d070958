"""Every boundary that untrusted bytes cross, fed with made-up ones: nothing hangs, grows, or breaks its word."""

from __future__ import annotations

import asyncio
import contextlib
import io
import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import mcp_types as types
import pytest
from pydantic import ValidationError
from pypdf import PdfWriter

from tests.support import fuzz
from tests.support.responses.replay import ReplayEngine
from tests.support.responses.server import Running, Script, create, running
from tests.support.responses.turns import HELLO
from tests.support.scale import SOAK
from vllm_gptoss.server.responses.options import ResponsesOptions
from vllm_gptoss.tools.confined import ConfinedError, Limit, Pool, Sizes, jobs
from vllm_gptoss.tools.confined.nursery import Nursery
from vllm_gptoss.tools.mcp import relay
from vllm_gptoss.tools.mcp.convert import to_result
from vllm_gptoss.tools.python.zmtp import ProtocolError, ZmtpConnection

pytestmark = pytest.mark.soak

BATCH = 50
CASES = 10_000 if SOAK else 200
LIMIT = Limit(seconds=120.0, cpu_s=60, memory=512 << 20)


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    nursery = Nursery([*jobs.modules(), "tests.support.fuzz"])
    yield nursery
    nursery.close()


def pdf() -> bytes:
    writer = PdfWriter()
    writer.add_blank_page(100, 100)
    writer.add_metadata({"/Title": "T"})
    out = io.BytesIO()
    writer.write(out)
    return out.getvalue()


@pytest.mark.parametrize("target", fuzz.TARGETS)
async def test_no_input_breaks_a_boundary(nursery: Nursery, target: str) -> None:
    pool = Pool(nursery, Sizes(2))
    payload = pdf() if target == "pdf" else b""

    async def batch(first: int) -> fuzz.Found:
        try:
            return await pool.run(fuzz.fuzz, payload, LIMIT, target=target, first=first, count=BATCH)
        except ConfinedError as error:
            return fuzz.Found({first: f"one of {BATCH}: {error}"})

    total = CASES
    found = []
    for group in range(0, total, 8 * BATCH):
        firsts = range(group, min(total, group + 8 * BATCH), BATCH)
        found += await asyncio.gather(*map(batch, firsts))
    wrong = {seed: said for one in found for seed, said in one.wrong.items()}
    assert not wrong, wrong
    assert sum(one.gave_up for one in found) < total


class Writer:
    """The end of a socket without a reader."""

    def write(self, data: bytes) -> None:
        pass

    async def drain(self) -> None:
        pass


async def test_no_bytes_of_a_kernels_socket_break_its_reader() -> None:
    """ZMTP frames: messages, an error of the protocol, or a wait for more; nothing else, and within the bounds."""
    for seed in range(CASES):
        chance = random.Random(seed)
        pieces = [
            *(b"\0\5hello", b"\1\3abc", b"\2" + (1 << 20).to_bytes(8, "big"), b"\3" + b"\xff" * 8, b"\4\0", b"\0\0"),
            *(b"\6" + (5).to_bytes(8, "big") + b"abcde", chance.randbytes(20), b"\1\0" * 100, b"\x08\1x"),
        ]
        reader = asyncio.StreamReader()
        reader.feed_data(b"".join(chance.choice(pieces) for _ in range(chance.randint(1, 40))))
        reader.feed_eof()
        connection = ZmtpConnection(reader, Writer(), 1 << 16)
        with contextlib.suppress(ProtocolError):
            async with asyncio.timeout(60):  # the end of the file is a ProtocolError too
                while frames := await connection.receive():
                    assert sum(map(len, frames)) <= 1 << 16


def test_no_output_of_a_stdio_server_breaks_the_relay(tmp_path: Path) -> None:
    for seed in range(CASES):
        data = b"\n".join(fuzz.made("json", seed + part) for part in range(3))
        (tmp_path / "out").write_bytes(data)
        with (tmp_path / "out").open("rb") as file:
            for line in relay.lines(file.fileno(), 4096):
                assert len(line) <= 4097
                assert line.count(b"\n") <= 1


def test_no_result_of_an_mcp_server_breaks_its_conversion() -> None:
    converted = 0
    for seed in range(CASES):
        try:
            result = types.CallToolResult.model_validate_json(fuzz.made("results", seed))
        except ValidationError:
            continue
        converted += 1
        assert len(to_result(result, 1000).text) < 3000
    assert converted > CASES // 20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    store = tmp_path_factory.mktemp("fuzz") / "store.sqlite"
    with running(ReplayEngine(Script(HELLO)), ResponsesOptions(store=str(store)), []) as server:
        yield server


@pytest.mark.parametrize(
    ("target", "path"), [("bodies", "/responses"), ("references", "/responses"), ("conversations", "/conversations")]
)
def test_no_request_breaks_the_endpoint(server: Running, target: str, path: str) -> None:
    """A 4xx with OpenAI's error object, or a result; never a 5xx, and none takes long."""
    statuses, wrong = Counter[int](), {}
    with server.http() as http:
        create(http, input=[{"role": "user", "content": "x" * 1000, "id": f"i{number}"} for number in range(3)])
        for seed in range(CASES):
            began = time.monotonic()
            answer = http.post(path, content=fuzz.made(target, seed))
            statuses[answer.status_code] += 1
            refused = 400 <= answer.status_code < 500 and answer.json()["error"]["message"]
            if not (answer.status_code == 200 or refused) or time.monotonic() - began > fuzz.SLOW_S:
                wrong[seed] = f"{answer.status_code} after {time.monotonic() - began:.1f} s: {answer.text[:200]}"
    assert not wrong, wrong
    assert statuses[200] > 0
    assert statuses[400] > CASES // 4
