"""The short way with launches emulated on the CPU and a model that records its inputs. Needs no GPU."""

from __future__ import annotations

import random
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from vllm_gptoss.engine.runner.batch import PARAMETERS, RING, Buffers
from vllm_gptoss.engine.runner.graphs import Graphs
from vllm_gptoss.engine.runner.model_runner import ShortWay

ROWS, SIZE, LIMIT = 8, 4, 64
PLAIN, TOP_K = (False,) * 6, (True, True, False, True, False, False)
Descriptor = namedtuple("Descriptor", ("cg_mode", "num_tokens", "num_reqs"))


def token_after(token: int, position: int) -> int:
    return (token * 31 + position * 7 + 1) % 1000


def prepare_pos_seq_lens(rows: Any, starts: Any, computed: Any, positions: Any, lengths: Any) -> None:
    positions[: len(rows)] = computed[rows]
    lengths[: len(rows)] = computed[rows] + 1


def combine_sampled_and_draft_tokens(ids: Any, rows: Any, last: Any, *_: Any) -> None:
    ids[: len(rows)] = last[rows]


def post_update(rows: Any, computed: Any, last: Any, counts: Any, sampled: Any, *_: Any) -> None:
    last[rows] = sampled.view(-1)
    computed[rows] += 1


def uva_buffer(size: tuple[int, ...], dtype: torch.dtype) -> Any:
    here = torch.zeros(size, dtype=dtype)
    return SimpleNamespace(uva=lambda: here, np=here.numpy())


PARTS = SimpleNamespace(
    FULL="full",
    InputBatch=SimpleNamespace,
    UvaBuffer=uva_buffer,
    ExecuteModelState=SimpleNamespace,
    NO_OP_KV_CONNECTOR=None,
    prepare_pos_seq_lens=prepare_pos_seq_lens,
    combine_sampled_and_draft_tokens=combine_sampled_and_draft_tokens,
    post_update=post_update,
)


class Tables:
    """vLLM's block tables of one group, [R, W], no wider than the longest request."""

    def __init__(self, slots: torch.Tensor) -> None:
        self.table, self.slots = torch.zeros(ROWS, LIMIT // SIZE, dtype=torch.int64), slots
        self.num_blocks = SimpleNamespace(gpu=torch.zeros(1, ROWS, dtype=torch.int32))
        self.held: dict[int, list[int]] = {}
        self.staged: list[int] = []

    def append_block_ids(self, row: int, new: Any, overwrite: bool) -> None:
        self.held[row] = [] if overwrite else self.held[row]
        self.held[row] += new[0]
        self.staged.append(row)

    def apply_staged_writes(self) -> None:
        for row in self.staged:
            self.table[row, : len(self.held[row])] = torch.tensor(self.held[row])
        self.staged.clear()

    def gather_block_tables(self, rows: Any, num_reqs_padded: int, num_computed_tokens: Any) -> None:
        pass

    def compute_slot_mappings(self, rows: Any, starts: Any, positions: Any, num_tokens_padded: int) -> None:
        at = positions[: len(rows)]
        self.slots[: len(rows)] = self.table[rows, at // SIZE] * SIZE + at % SIZE


class HostBuffers(Buffers):
    """Those of the processor."""

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        self.sampler = SimpleNamespace(sample=self.draw)
        self.add_blocks = self.fill_blocks

    def draw(self, logits: Any, also: Any, rows: Any, on_host: Any, positions: Any, ids: Any, *_: Any) -> Any:
        made = [token_after(token, at) for token, at in zip(ids.tolist(), positions.tolist(), strict=True)]
        return torch.tensor(made), None


class HostGraphs(Graphs):
    """Its graphs do again what was captured."""

    def __init__(self, *_: Any) -> None:
        self.works, self.fails = OrderedDict(), False

    def capture(self, launch: Callable[[], object]) -> Any:
        if self.fails:
            raise RuntimeError("operation not permitted when stream is capturing")
        return SimpleNamespace(replay=launch)


class Connector:
    """vLLM's notifications of a KV connector, with how many steps of the model have run at each."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.told = engine, []

    def pre_forward(self, step: Any, inputs: Any, attn_metadata: Any = None) -> None:
        self.told.append(("pre_forward", len(self.engine.seen), step.kv_connector_metadata, inputs.req_ids))

    def finish_forward(self) -> None:
        self.told.append(("finish_forward", len(self.engine.seen)))

    def post_forward(self, finished: set[str], defer_finalize: bool = False) -> Any:
        self.told.append(("post_forward", len(self.engine.seen), finished, defer_finalize))
        return f"output {len(self.engine.seen)}"


class Engine:
    """A runner's states and its short way, with a model that puts down what it is given."""

    def __init__(self, ranks: int = 1) -> None:
        def gpu() -> Any:
            return torch.zeros(ROWS, dtype=torch.int64)

        self.inputs = SimpleNamespace(
            input_ids=gpu(), positions=gpu(), seq_lens=gpu(), is_padding=gpu(),
            query_start_loc=torch.arange(ROWS + 1, dtype=torch.int32),
        )  # fmt: skip
        self.slots, self.seen = gpu(), []
        self.states = SimpleNamespace(
            req_id_to_index={}, num_computed_tokens=SimpleNamespace(gpu=gpu()), last_sampled_tokens=gpu(),
            num_computed_tokens_np=np.zeros(ROWS, dtype=np.int32), draft_tokens=None,
            num_computed_prefill_tokens=np.zeros(ROWS, dtype=np.int32),
            prefill_len=SimpleNamespace(np=np.zeros(ROWS, dtype=np.int32), gpu=torch.zeros(ROWS)),
            all_token_ids=SimpleNamespace(gpu=None), total_len=SimpleNamespace(gpu=None),
        )  # fmt: skip
        self.runner = SimpleNamespace(
            req_states=self.states, input_buffers=self.inputs, block_tables=Tables(self.slots), device=None,
            model_state=SimpleNamespace(prepare_attn=lambda *_: None), attn_groups=None, kv_cache_config=None,
            model=SimpleNamespace(compute_logits=lambda hidden: hidden), vocab_size=1000,
            sampler=SimpleNamespace(
                penalties_state=SimpleNamespace(output_bin_counts=None),
                sampling_states=SimpleNamespace(**{name: SimpleNamespace(np=None, gpu=gpu()) for name in PARAMETERS}),
            ),
            parallel_config=SimpleNamespace(tensor_parallel_size=ranks),
            model_config=SimpleNamespace(head_dtype=torch.float32), max_num_reqs=ROWS, num_speculative_steps=0,
            lora_config=None, prompt_logprobs_worker=None, finish_requests=self.finish, kv_connector=Connector(self),
            cudagraph_manager=SimpleNamespace(
                dispatch=lambda n, *_, **__: Descriptor("full", n, n), run_fullgraph=self.run_model
            ),
        )  # fmt: skip
        self.short_way: Any = object.__new__(ShortWay)
        vars(self.short_way).update(
            runner=self.runner, buffers=HostBuffers(self.runner), graphs=HostGraphs(), batch=None,
            events=[SimpleNamespace(record=lambda: None)] * RING, turn=0, has_failed=False, has_begun=False,
            ranks=ranks,
        )  # fmt: skip
        self.length: dict[str, int] = {}
        self.token: dict[str, int] = {}

    def run_model(self, made: Any) -> torch.Tensor:
        given = (self.inputs.positions, self.inputs.input_ids, self.slots)
        self.seen.append([each[: made.num_reqs].tolist() for each in given])
        return torch.zeros(made.num_tokens, 10)

    def finish(self, step: Any) -> None:
        for name in step.finished_req_ids | (step.preempted_req_ids or set()):
            self.states.req_id_to_index.pop(name)

    def step(self, names: list[str], **changes: Any) -> Any:
        """A `SchedulerOutput`, with a new block for each request if its next token needs one."""
        new: list[Any] = []
        for name in names:
            held = self.runner.block_tables.held[self.states.req_id_to_index[name]]
            new.append(([random.randrange(1, 99)],) if self.length[name] >= len(held) * SIZE else None)
        known = SimpleNamespace(
            req_ids=names, resumed_req_ids=set(), new_block_ids=new, num_computed_tokens=[self.length[n] for n in names]
        )
        none = ("kv_connector_metadata", "ec_connector_metadata", "aux_output_connector_metadata")
        none += ("new_block_ids_to_zero", "kv_cache_block_copies")
        fields: dict[str, Any] = {
            "scheduled_cached_reqs": known, "scheduled_new_reqs": [], "num_scheduled_tokens": dict.fromkeys(names, 1),
            "total_num_scheduled_tokens": len(names), "scheduled_spec_decode_tokens": {}, "finished_req_ids": set(),
            "scheduled_encoder_inputs": {}, "preempted_req_ids": None, **dict.fromkeys(none),
        }  # fmt: skip
        return SimpleNamespace(**fields | changes)

    def decode(self, *names: str, by_vllm: bool = False, **changes: Any) -> None:
        """One step the short way. Compares the model's inputs with plain bookkeeping. by_vllm: vLLM's sampler takes
        the tokens."""
        taken = self.short_way.take(self.step(list(names), **changes))
        rows = [self.states.req_id_to_index[name] for name in names]
        positions = [self.length[name] for name in names]
        held = [self.runner.block_tables.held[row] for row in rows]
        slots = [have[at // SIZE] * SIZE + at % SIZE for at, have in zip(positions, held, strict=True)]
        assert self.seen[-1] == [positions, [self.token[name] for name in names], slots]
        for name in names:
            self.token[name] = token_after(self.token[name], self.length[name])
            self.length[name] += 1
        if by_vllm:
            self.update(rows, [self.token[name] for name in names])
        else:
            output = self.short_way.sample(taken)
            assert output.tokens.tolist() == [self.token[name] for name in names]

    def update(self, rows: list[int], tokens: list[int]) -> None:
        states = self.states
        post_update(rows, states.num_computed_tokens.gpu, states.last_sampled_tokens, None, torch.tensor(tokens))

    def leave_to_vllm(self, *names: str, length: int = 5) -> None:
        """Runs a step on vLLM's path that adds these requests, with prompts of `length` tokens, in shared buffers."""
        assert self.short_way.take(self.step([], scheduled_new_reqs=list(names))) is None
        for name in names:
            row = next(row for row in range(ROWS) if row not in self.states.req_id_to_index.values())
            self.states.req_id_to_index[name] = row
            self.states.prefill_len.np[row] = self.states.num_computed_tokens_np[row] = length
            self.states.num_computed_tokens.gpu[row] = self.length[name] = length
            self.states.last_sampled_tokens[row] = self.token[name] = random.randrange(1000)
            blocks = [random.randrange(1, 99) for _ in range(-(-length // SIZE))]
            self.runner.block_tables.append_block_ids(row, (blocks,), overwrite=True)
        self.scramble()

    def scramble(self) -> None:
        for buffer in (self.inputs.input_ids, self.inputs.positions, self.slots):
            buffer.fill_(-1)
