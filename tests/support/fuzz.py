"""Runs one hostile input through a fuzz target, and makes such inputs. Jobs: a confined worker runs a batch.

A worker's limits of time and memory apply to the batch: a case that never ends, or takes all memory, ends the batch and
names its seeds. A target without a worker in production is strict: it may raise only the errors of its docstring.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from vllm_gptoss.tools import arguments
from vllm_gptoss.tools.browser import charset, markup, reading, robots_txt
from vllm_gptoss.tools.browser.page import wrap
from vllm_gptoss.tools.confined import Refused, job
from vllm_gptoss.tools.confined.content import json_content, undone
from vllm_gptoss.tools.confined.json_tree import MAX_DIGITS, MAX_NODES, Count, json_problem
from vllm_gptoss.tools.confined.json_value import decode
from vllm_gptoss.tools.python import messages

OF_JSON = {"kernel", "frames", "results", "schemas", "references", "conversations"}
SLOW_S = 4.0
"""Seconds of processor time for one case of at most 64 kB."""

_MAX = 64 << 10
_KEY = b"key"

CORPUS: dict[str, list[bytes]] = {
    "html": [
        b"<title>T</title><p>a <a href='/x'>b</a><img alt=c><sup>2</sup><ul><li>1<ol start=3><li>2</ol></ul>",
        b"<table><tr><th colspan=3>a<td>b</table><pre> x\n y</pre><blockquote>q</blockquote><h1>h</h1><hr><br>",
        b"<base href='http://b.example/'><a href='//[::1'>x</a><a href='javascript:1'>y</a><!-- c --><p hidden>z",
        "<ol start='²'><li>【5†x】 &#12304;3†L1&#12305;</ol>".encode(),
        b"<p>a" + b" " * 2000 + b"b",
        b"<div>" * 300,
        b"<svg><math><template><p>x</template></math></svg><![CDATA[x]]><?xml version='1.0'?><!DOCTYPE html>",
    ],
    "pdf": [],
    "robots": [
        b"User-agent: *\nDisallow: /a*b$\nCrawl-delay: 5\nSitemap: http://a.example/s\n# c\nAllow: /",
        b"User-agent: a\nUser-agent: vllm-gptoss\nDisallow: /%7E\nRequest-rate: 1/5 0800-1200\nVisit-time: 1-2",
        b"\xef\xbb\xbfuser agent *\ncrawl-delay: 1e309\nDisallow: " + b"*a" * 200,
    ],
    "encodings": [
        b"<meta charset=shift_jis>" + "日本".encode("shift_jis"),
        b"\xff\xfe<\x00p\x00>\x00",
        b"<meta charset=punycode>a-b-c-",
        b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03KL\x04\x00\xe4\xa2;\x91\x03\x00\x00\x00",
        b"x\x9cKL\x04\x00\x02I\x01#",
        "Größe déjà vu".encode("latin-1") * 20,
    ],
    "kernel": [
        b'{"msg_type": "stream"}\0{"msg_id": "1"}\0{}\0{"name": "stdout", "text": "x\\u001b[1m"}',
        b'{"msg_type": "display_data"}\0{}\0{}\0{"data": {"image/png": "iVBORw0KGgo=", "text/plain": "p"}}',
        b'{"msg_type": "execute_reply"}\0[]\0{}\0{"status": "error", "payload": [1], "ename": []}',
        b'{"msg_type": "error"}\0{}\0{}\0{"ename": "E", "evalue": "v", "traceback": ["a", 5]}',
        b'{"msg_type": ["status"]}\0{"msg_id": [1]}\0null\0[]',
    ],
    "frames": [
        b'["reply", {"id": "1", "content": {"status": "ok", "payload": [{"source": "ask_exit"}]}}]',
        b'["display_data", {"data": {"application/json": [[[]]]}}]',
        b'["stream", {"text": "\\ud800"}]',
    ],
    "json": [
        b'{"jsonrpc": "2.0", "id": 1, "result": {"content": [{"type": "text", "text": "[{,:"}]}}',
        b"[[[]]]",
        b'"\\"',
    ],
    "results": [
        b'{"content": [{"type": "text", "text": "t"}, {"type": "image", "data": "iVBO", "mimeType": "image/png"}]}',
        b'{"content": [{"type": "resource", "resource": {"uri": "a://b", "blob": "%%"}}], "structuredContent": {}}',
        b'{"content": [{"type": "resource_link", "uri": "a://b", "name": "n"}, {"type": "audio"}], "isError": true}',
        b'{"content": [{"type": "image", "data": "\\ud800", "mimeType": "text/html"}], "_meta": []}',
    ],
    "schemas": [
        b'{"properties": {"a": {"pattern": "^(b+)+c$", "type": "string"}}}\0{"a": "bbbb"}',
        b'{"$defs": {"n": {"allOf": [{"$ref": "#/$defs/n"}]}}, "$ref": "#/$defs/n"}\0{}',
        b'{"type": "nonsense", "enum": 5, "required": "x", "properties": [], "$schema": "x"}\0{"a": 1}',
        b'{"patternProperties": {"(": {}}, "uniqueItems": true, "multipleOf": 0}\0{"a": [1, 1]}',
        b'{"$schema": ["x"], "properties": {"a": {"$ref": 1e300}}}\0{"a": 1}',  # found by this fuzzer
        b'{"$defs": {"a": {"$ref": -1.5}}, "$ref": "#/$defs/a"}\0{"a": 1}',  # found by this fuzzer
    ],
    "bodies": [
        b'{"model": "gpt-oss-20b", "input": [{"role": "user", "content": [{"type": "input_text", "text": "t"}]}]}',
        b'{"input": "\\\\\\"[{,:", "metadata": {"a": "b"}, "tools": [], "temperature": 1e-9}',
        b"[" * 200 + b"]" * 200,
        b"[" + b"[]," * 2000 + b"1]",
        b"[" + b"9" * 1500 + b"]",
    ],
    "references": [
        b'{"model": "gpt-oss-20b", "input": [{"type": "item_reference", "id": "i0"}, {"id": "i1"}, {"id": "i2"}]}',
        b'{"model": "gpt-oss-20b", "input": [{"id": "i0"}, {"id": "i0"}, {"role": "user", "content": "u"}]}',
        b'{"model": "gpt-oss-20b", "input": [{"id": "none"}], "store": false, "previous_response_id": "resp_0"}',
    ],
    "conversations": [
        b'{"metadata": {"a": "b"}, "items": [{"role": "user", "content": "u", "id": "i0"}, {"role": "assistant"}]}',
        b'{"items": [{"type": "function_call", "call_id": "c", "name": "n", "arguments": "{}"}, {"id": "i0"}]}',
        b'{"items": [{"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]}]}',
    ],
}
TOKENS = [
    *(b"<", b">", b"</", b"&#", b"\0", b"\xff", b"'", b'"', b"{", b"}", b"[", b"]", b",", b":", b"\\", b"\n", b" "),
    *(b"<a href=", b"<pre>", b"<table>", b"<td>", b"<li>", b"<sup>", b"stream", b"endstream", b"obj", b"/Kids", b"<<"),
    *(b"User-agent: ", b"Disallow: /", b"*", b"$", b'"$ref": "#"', b'"allOf": [', b"1e999", b"-1", "【²".encode()),
]


def made(target: str, seed: int) -> bytes:
    """The case `seed` of `target`: the corpus itself first, then changes of it."""
    corpus = CORPUS[target]
    if seed < len(corpus):
        return corpus[seed]
    chance = random.Random(f"{target} {seed}")
    if target in OF_JSON and chance.random() < 0.7:
        parts = chance.choice(corpus).split(b"\0")
        return b"\0".join(json.dumps(_twisted(json.loads(part), chance)).encode() for part in parts)
    data = bytearray(chance.choice(corpus))
    for _ in range(chance.randint(1, 8)):
        at, length = chance.randint(0, len(data)), chance.choice([1, 2, 8, 64])
        match chance.randint(0, 5):
            case 0:
                data[at : at + 1] = bytes([chance.randint(0, 255)])
            case 1:
                del data[at : at + length]
            case 2:
                data[at:at] = data[at : at + length] * chance.choice([1, 3, 50])
            case 3:
                data[at:at] = chance.choice(TOKENS)
            case 4:
                data[at:at] = chance.choice(TOKENS) * chance.choice([10, 200, 5000])
            case 5:
                data[at:] = chance.choice(corpus)[chance.randint(0, 200) :]
    return bytes(data[:_MAX])


def _twisted(value: object, chance: random.Random) -> object:
    """JSON of the same shape, but for some values of another type."""
    if chance.random() < 0.08:
        return chance.choice([None, True, 5, -1.5, 1e300, "", "x" * 300, "\ud800", "[{", [], [[]], {}, {"a": None}])
    if isinstance(value, dict):
        return {key: _twisted(one, chance) for key, one in value.items() if chance.random() < 0.95}
    if isinstance(value, list):
        return [_twisted(one, chance) for one in value for _ in range(chance.choice([1, 1, 1, 3]))]
    return value


def _document(document: reading.Document) -> None:
    assert len(document.lines) == len(document.soft) <= reading.MAX_LINES + 2
    assert len(document.title) <= reading.MAX_TITLE
    assert len(document.links) <= markup.MAX_LINKS
    assert all(len(url) <= markup.MAX_URL for url, _, _ in document.links)
    page = reading.page_of(document, "http://a.example/")
    if len(document.lines) <= reading.MAX_LINES:
        assert page.wrapped == wrap(page.text)
    shown = page.text
    for number, part in enumerate(shown.split("【")[1:]):
        assert part.partition("†")[0].isdigit(), (number, part[:40])


def _html(data: bytes) -> None:
    kind = ("text/html", "text/plain", "application/rss+xml", "text/html; charset=utf-16")[len(data) % 4]
    source = len(data) % 7 == 0
    options = {"url": "http://a.example/", "encoding": "", "max_bytes": _MAX, "cut": False, "source": source}
    _document(reading.read(data, content_type=kind, **options))  # type: ignore[arg-type]


def _pdf(data: bytes) -> None:
    _document(reading.read_pdf(data, url="http://a.example/"))


def _robots(data: bytes) -> None:
    said = robots_txt.verdict(data, encoding="", agent="vllm-gptoss", url="http://a.example/a/b?c")
    again = robots_txt.verdict(said.rules.encode(), encoding="", agent="vllm-gptoss", url="http://a.example/a/b?c")
    assert (said.allowed, said.delay_s) == (again.allowed, again.delay_s)


def _encodings(data: bytes) -> None:
    assert isinstance(charset.text_of(data, ("utf-8", "punycode", "shift_jis", None)[len(data) % 4]), str)
    for encoding in ("gzip", "deflate", "gzip, gzip"):
        try:
            content, _ = undone(data, encoding, 1 << 20)
        except Refused:
            continue
        assert len(content) <= 1 << 20


def _kernel(data: bytes) -> None:
    """Strict: small messages are read on the event loop."""
    parts = (data.split(b"\0") + [b"{}"] * 4)[:4]
    digest = hmac.new(_KEY, b"".join(parts), hashlib.sha256).hexdigest().encode()
    for frames in ([b"topic", b"<IDS|MSG>", digest, *parts], data.split(b"\0"), [b"<IDS|MSG>", *data.split(b"\0")]):
        try:
            message = messages.read(frames, _KEY, 1000)
        except messages.MalformedError:
            continue
        assert all(isinstance(value, (str, int, bool)) for value in message.content.values())
        assert sum(len(value) for value in message.content.values() if isinstance(value, str)) <= len(data) + 5000


def _frames(data: bytes) -> None:
    """Strict, as `_kernel`."""
    try:
        assert isinstance(messages.read_pair(data, 1000).kind, str)
    except messages.MalformedError:
        return


def _json(data: bytes) -> None:
    """What passes has a tree that can be built; strict."""
    try:
        content = json_content(data, max_bytes=_MAX)
    except Refused:
        return
    assert json_problem(content) is None
    try:
        value = json.loads(content)
    except ValueError:
        return
    nodes, waiting = 0, [value]
    while waiting:
        nodes += 1
        one = waiting.pop()
        waiting += [*one.values()] if isinstance(one, dict) else one if isinstance(one, list) else []
    assert nodes <= MAX_NODES + 1


def _bodies(data: bytes) -> None:
    """What passes has as many values, and as deep, as the count allows, however its parts were cut; strict."""
    count, step = Count(1000, 128), 1 + len(data) % 700
    if any(count.add(data[at : at + step]) for at in range(0, len(data), step)):
        return
    try:
        level = [decode(data)]
    except ValueError:
        return
    values = depth = 0
    while level:
        values, depth = values + len(level), depth + 1
        assert all(abs(one) < 10**MAX_DIGITS for one in level if isinstance(one, int))
        level = [
            inner
            for one in level
            if isinstance(one, (list, dict))
            for inner in (one.values() if isinstance(one, dict) else one)
        ]
    assert values <= 1001
    assert depth <= 129


def _schemas(data: bytes) -> None:
    schema, _, value = data.partition(b"\0")
    try:
        parsed = json.loads(schema)
    except (ValueError, RecursionError):
        parsed = {"const": schema.decode("latin-1")}
    if isinstance(parsed, dict) and (text := arguments.schema_text(parsed)) is not None:
        arguments._is_plain(text)
        verdict = arguments.judged(value.decode("utf-8", "replace").encode(), text)
        assert len(verdict.problem) < 5000


TARGETS: dict[str, Callable[[bytes], None]] = {
    "html": _html,
    "pdf": _pdf,
    "robots": _robots,
    "encodings": _encodings,
    "kernel": _kernel,
    "frames": _frames,
    "json": _json,
    "schemas": _schemas,
    "bodies": _bodies,
}
STRICT = {"kernel", "frames", "json", "schemas", "encodings", "robots", "bodies"}
"""Targets where any exception is a failure. A parser of documents may raise one: the worker reports it, and ends."""


@dataclass
class Found:
    """The failures by seed, and the number of cases that gave up."""

    wrong: dict[int, str] = field(default_factory=dict)
    gave_up: int = 0


@job
def fuzz(payload: bytes, *, target: str, first: int, count: int) -> Found:
    """Runs the cases `first` … `first + count`. `payload`: more of the corpus."""
    if payload and payload not in CORPUS[target]:
        CORPUS[target].append(payload)
    found = Found()
    for seed in range(first, first + count):
        data = made(target, seed)
        before = time.process_time()
        try:
            TARGETS[target](data)
        except (Refused, MemoryError):
            found.gave_up += 1
        except AssertionError as error:
            found.wrong[seed] = f"{error!r}"[:300]
        except Exception as error:
            found.gave_up += 1
            if target in STRICT:
                found.wrong[seed] = f"{type(error).__name__}: {error}"[:300]
        if time.process_time() - before > SLOW_S:
            found.wrong[seed] = f"{time.process_time() - before:.1f} s for {len(data)} bytes"
    return found
