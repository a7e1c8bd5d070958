"""How many GPUs, servers and connections a number of users needs: arithmetic over measured figures.

    python -m benchmarks.capacity                       # the table of docs/scale.md
    python -m benchmarks.capacity --users 500 --speed 30 --context 16384

Measured, from result files: time per token by requests at once, prefill, the API server's processor time per token, the
store's transactions per response. Calculated: everything else. Between measured batch sizes, values are interpolated
linearly. The largest measured batch size is never exceeded.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

from benchmarks.tables import by_batch, prompt_speed, result
from vllm_gptoss.cli.recipes.memory import MEASURED, Cache
from vllm_gptoss.engine.choose import Deployment
from vllm_gptoss.engine.spec import GPT_OSS_20B, GPT_OSS_120B, ModelSpec
from vllm_gptoss.server.responses.state.database import AT_ONCE

USERS = (10, 100, 1_000, 10_000)
BLOCK = 16
IN_FLIGHT = 2048  # tokens of a prompt that are read in one step
POOL = AT_ONCE[False]
"""Database connections of one API server at most."""
IDLE_NOTEBOOK_MIB = 31
"""Measured, docs/security.md."""


@dataclass(frozen=True)
class Wishes:
    """What is assumed of users.

    generating: share of them who are being answered at a moment; speed: tokens a second that each reads at least
    context: tokens of a conversation; read: of them new in a turn; answer: tokens of one
    tools: calls of python a turn, call_s seconds each; notebooks: share of users who have one, notebook_mib in it
    background: share of responses that run there; fill: how full a part may be; spare: replicas that may be missing
    node_gib: memory of a tools node
    """

    generating: float = 0.2
    speed: float = 40.0
    context: int = 8192
    read: int = 1000
    answer: int = 600
    tools: float = 0.5
    call_s: float = 1.0
    notebooks: float = 0.25
    notebook_mib: int = 256
    fill: float = 0.8
    node_gib: int = 64
    spare: int = 1
    background: float = 0.1


@dataclass(frozen=True)
class Engine:
    """One replica. steps: ms of one by requests at once, 512 + 128 tokens; prefill: tokens a second of the largest
    batch; per_token_ns: what each token of context adds to a step; kv_gib: of cache."""

    model: ModelSpec
    gpu: str
    gpus: int
    steps: dict[int, float]
    prefill: float
    per_token_ns: float
    kv_gib: float

    def step_ms(self, streams: float, context: int) -> float:
        """A step of `streams` requests with `context` tokens each. Measured at batches, a line between them."""
        longer = max(0, context - 512) * streams * self.per_token_ns / 1e6
        batches = sorted(self.steps)
        for few, many in itertools.pairwise(batches):
            if streams <= many:
                share = max(0.0, (streams - few) / (many - few))
                return self.steps[few] + share * (self.steps[many] - self.steps[few]) + longer
        raise ValueError(f"{streams} requests at once were not measured, only up to {batches[-1]}")

    def speed(self, streams: int, wishes: Wishes) -> float:
        """Tokens a second for each of `streams`, while prompts of as many turns a second are read as they make."""
        step_s = self.step_ms(streams, wishes.context) / 1000
        read_s = streams * wishes.read / self.prefill  # for an answer of each stream
        return wishes.answer / (wishes.answer * step_s + read_s)

    def fits(self, wishes: Wishes) -> int:
        """The most concurrent requests such that their contexts fit the cache together."""
        return int(Cache.of(Deployment(self.model), BLOCK).requests(self.kv_gib, wishes.context, IN_FLIGHT))

    def streams(self, wishes: Wishes) -> int:
        """The most concurrent requests that are measured, fit and reach the requested speed; 0 if none does."""
        most = min(max(self.steps), self.fits(wishes))
        return max((n for n in range(1, most + 1) if self.speed(n, wishes) >= wishes.speed), default=0)


@dataclass(frozen=True)
class Plan:
    """What `users` need. turns, transactions: a second; api_servers: processes, in all replicas."""

    users: int
    streams: int
    turns: float
    streams_per_replica: int
    replicas: int
    gpus: int
    api_servers: int
    tools_nodes: int
    transactions: float
    connections: int


def plan(users: int, engine: Engine, wishes: Wishes) -> Plan:
    """Raises ValueError if the engine is slower than requested even for one."""
    each = engine.streams(wishes)
    if not each:
        raise ValueError(f"{engine.model.name} on {engine.gpu} is slower than {wishes.speed} tokens a second")
    streams = math.ceil(users * wishes.generating)
    needed = math.ceil(streams / (each * wishes.fill))
    replicas = needed + (wishes.spare if users > USERS[0] else 0)
    turns = streams * wishes.speed / wishes.answer
    busiest = min(streams / needed, each)
    per_server = host_us_per_token() / 1e6 * busiest * engine.speed(max(1, round(busiest)), wishes)
    servers = replicas * math.ceil(per_server / wishes.fill)
    notebooks = max(users * wishes.notebooks, turns * wishes.tools * wishes.call_s)
    per_node = wishes.node_gib * 1024 * wishes.fill / (wishes.notebook_mib + IDLE_NOTEBOOK_MIB)
    nodes = math.ceil(notebooks / per_node) + (1 if users > USERS[0] else 0)
    store = turns * transactions_per_response(wishes.background)
    return Plan(users, streams, turns, each, replicas, replicas * engine.gpus, servers, nodes, store, servers * POOL)


# Measured figures


def host_us_per_token() -> float:
    """Microseconds of the API server's processor time for a streamed token of `/v1/responses`."""
    rows = result("host-cpu-2026-11-24.json")["rows"]
    (row,) = [r for r in rows if (r["variant"], r["endpoint"]) == ("plugin", "responses")]
    return float(row["cpu_us_per_token"])


def transactions_per_response(background: float) -> float:
    """Of the store, for one response of five turns with calls of python in two of them. background: share of those that
    run there and are followed, at 100 tokens a second; the others are streamed. PostgreSQL."""
    found = result("soak-cpu-2026-11-23.json")["transactions_by_style"]
    return float(background * found["followed"] + (1 - background) * found["streamed"])


def _per_token_ns() -> float:
    """What a token of context adds to a step of the 20b on H200: 8 requests of 8,192 and of 512 tokens."""
    names = "decode-h200-8k-2026-11-22.json", "decode-h200-2026-11-22.json"
    long, short = (by_batch([result(name)])["20b"][8] for name in names)
    tokens = 8 * (long["prompt"] + long["output"] / 2 - short["prompt"] - short["output"] / 2)
    return float(long["plugin_tpot_ms"] - short["plugin_tpot_ms"]) / tokens * 1e6


def _engine(model: ModelSpec, short: str, gpu: str, names: Sequence[str], slower: float = 1.0) -> Engine:
    """Of several files, the last one that has a batch."""
    rows = by_batch([result(name) for name in names])[short]
    steps = {batch: float(row.get("plugin_decode_ms") or row["plugin_tpot_ms"]) for batch, row in rows.items()}
    prefill = prompt_speed(rows[max(rows)], "plugin")
    assert prefill is not None, "prompts of the largest batch were not measured"
    per_token = _per_token_ns() * model.layers / GPT_OSS_20B.layers * slower
    return Engine(model, gpu, 1, steps, prefill, per_token, _kv_gib(short, gpu))


def _kv_gib(short: str, gpu: str) -> float:
    """The least KV cache of the plugin on one such GPU, of those that were measured."""
    found = [
        start.kv_gib
        for start in MEASURED
        if (start.model, start.device, start.experts, start.count) == (short, gpu, "gptoss", 1) and not start.layers
    ]
    return min(found)


def engines() -> Sequence[Engine]:
    """The H100's longer contexts cost more than the H200's by the ratio of the memories' bandwidths."""
    slower = 4.8 / 3.35
    return (
        _engine(GPT_OSS_20B, "20b", "H200", ("decode-h200-2026-11-25.json", "decode-h200-eight-2026-11-27.json")),
        _engine(
            GPT_OSS_20B, "20b", "H100", ("decode-h100-rounds-2026-11-25.json", "decode-h100-2026-11-27.json"), slower
        ),
        _engine(
            GPT_OSS_120B, "120b", "H200", ("decode-h200-120b-2026-11-26.json", "decode-h200-120b-eight-2026-11-27.json")
        ),
        _engine(GPT_OSS_120B, "120b", "H100", ("decode-h100-120b-2026-11-26.json",), slower),
    )


HEAD = (
    "model", "GPU", "users", "streams at once", "streams a replica", "replicas = GPUs", "API servers", "tools nodes",
    "turns/s", "store transactions/s", "database connections, at most",
)  # fmt: skip


def table(users: Sequence[int] = USERS, wishes: Wishes | None = None) -> list[list[str]]:
    """Rows under `HEAD`."""
    rows = []
    for engine in engines():
        for count in users:
            p = plan(count, engine, wishes or Wishes())
            row = [engine.model.name.removeprefix("gpt-oss-"), engine.gpu, f"{count:,}", f"{p.streams:,}"]
            row += [str(p.streams_per_replica), f"{p.gpus:,}", f"{p.api_servers:,}", f"{p.tools_nodes:,}"]
            rows.append([*row, f"{p.turns:,.1f}", f"{p.transactions:,.0f}", f"{p.connections:,}"])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--users", type=int, nargs="+", default=USERS)
    for field in fields(Wishes):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default)
    given = vars(parser.parse_args())
    users = given.pop("users")
    for row in [list(HEAD), *table(users, Wishes(**given))]:
        print(" | ".join(row))


if __name__ == "__main__":
    main()
