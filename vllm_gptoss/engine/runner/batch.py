"""What stays while the same requests decode: where vLLM keeps them, and the tensors that a graph may know by address.

vLLM keeps a request's parameters in pools of pinned buffers and goes on to the next one with every change
(`vllm/v1/worker/gpu/buffer_utils.py`), so a graph cannot know where they are. `Buffers` has copies on the GPU, made
when a batch begins. Axes: R the most requests, n those of a batch, p and t requests and tokens of the padded graph.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from vllm_gptoss._vllm import runner as vllm

RING = 4
"""Rows of pinned memory that sampled tokens go to in turn; two steps are under way at most. Of several GPUs, vLLM reads
the first rank's rows only."""
LOGITS_BYTES = 128 * 2**20
"""Maximum memory of a graph's logits. vLLM's memory profile does not include it."""
PARAMETERS = ("temperature", "seeds", "top_k", "top_p", "min_p")


class Buffers:
    """Tensors on the GPU that keep their addresses from batch to batch, all of vLLM's types."""

    def __init__(self, runner: Any) -> None:
        most, device = runner.max_num_reqs, runner.device
        states, tables, sampling = runner.req_states, runner.block_tables, runner.sampler.sampling_states
        self.each = each = 1 + runner.num_speculative_steps
        """Tokens of a request in a step: its drafts and one more."""
        self.rows = torch.zeros(most, dtype=torch.int64, device=device)
        """[R] a request's row in vLLM's states, by its place in the batch."""
        self.expanded = self.rows if each == 1 else torch.zeros(most * each, dtype=torch.int64, device=device)
        """[R * each] the same by a token's place."""
        self.local = torch.arange(each, dtype=torch.int32, device=device).repeat(most)
        self.count = torch.arange(most + 1, dtype=torch.int32, device=device) * each
        self.places = torch.arange(most * each, dtype=torch.int64, device=device)
        self.zeros = torch.zeros(most, dtype=torch.int32, device=device)
        self.ones = torch.ones(most, dtype=torch.int32, device=device)
        self.prefill_len = torch.zeros_like(states.prefill_len.gpu)
        self.num_blocks = torch.zeros_like(tables.num_blocks.gpu)
        self.tables = copy.copy(tables)
        self.tables.num_blocks = SimpleNamespace(gpu=self.num_blocks)
        self.sampler = copy.copy(runner.sampler)
        self.sampler.sampling_states = copy.copy(sampling)
        self.parameters = {name: torch.zeros_like(getattr(sampling, name).gpu) for name in PARAMETERS}
        for name, here in self.parameters.items():
            setattr(self.sampler.sampling_states, name, SimpleNamespace(np=getattr(sampling, name).np, gpu=here))
        self.ring = vllm.parts().UvaBuffer((RING, most), torch.int64)
        self.slot = torch.zeros(1, dtype=torch.int64, device=device)
        """[1] the ring's row that the next step writes."""
        self.logits: torch.Tensor | None = None
        """[n, V] where graphs find the logits of all ranks; None on one GPU, and with drafts, which vLLM samples."""
        if each == 1 and runner.parallel_config.tensor_parallel_size > 1:
            room = (min(most, LOGITS_BYTES // (2 * runner.vocab_size)), runner.vocab_size)
            self.logits = torch.zeros(room, dtype=runner.model_config.head_dtype, device=device)

    def fill(self, runner: Any, batch: Batch) -> None:
        """Copies what `batch` needs, in the order of the stream."""
        count, tokens = len(batch.req_ids), batch.descriptor.num_tokens
        inputs, used = runner.input_buffers, count * self.each
        rows = torch.from_numpy(batch.rows).pin_memory()
        self.rows[:count].copy_(rows, non_blocking=True)
        if self.each > 1:
            self.expanded[:used].view(count, self.each).copy_(self.rows[:count, None])
        # As `prepare_inputs` leaves it: rows beyond the batch start where it ends.
        torch.clamp(self.count, max=used, out=inputs.query_start_loc)
        if vllm.marks_padding():
            inputs.is_padding[:used].fill_(False)
            inputs.is_padding[used:tokens].fill_(True)
        self.prefill_len.copy_(runner.req_states.prefill_len.gpu, non_blocking=True)
        for name, here in self.parameters.items():
            here.copy_(getattr(runner.sampler.sampling_states, name).gpu, non_blocking=True)

    def fill_blocks(self, runner: Any) -> None:
        """Applies what vLLM has staged for its block tables, and takes over how many blocks each request has."""
        runner.block_tables.apply_staged_writes()
        self.num_blocks.copy_(runner.block_tables.num_blocks.gpu, non_blocking=True)

    def add_blocks(self, runner: Any) -> None:
        """The same while a batch decodes, a block each for some requests: one copy and a launch for each table."""
        if not write_blocks(runner.block_tables, self.num_blocks, runner.device):
            self.fill_blocks(runner)


def write_blocks(tables: Any, num_blocks: torch.Tensor, device: torch.device) -> bool:
    """Writes the staged blocks of vLLM's `BlockTables` to its tables, and their numbers to num_blocks [G, R] int32.

    As `FusedStagedWriter` of `vllm/v1/worker/gpu/buffer_utils.py` reads them. False, and nothing is done, where a
    request got several blocks. vLLM's own numbers follow with its next step, which copies all of them.
    """
    where: list[np.ndarray] = []
    what: list[np.ndarray] = []
    counts: list[np.ndarray] = []
    numbers: list[np.ndarray] = []
    for group, table in enumerate(tables.block_tables):
        if len(table._staged_write_contents) != len(table._staged_write_indices):
            return False
        rows = np.array(table._staged_write_indices, dtype=np.int64)
        where.append(rows * table.gpu.stride(0) + np.array(table._staged_write_starts, dtype=np.int64))
        what.append(np.array(table._staged_write_contents, dtype=np.int32))
        counts.append(rows + group * num_blocks.shape[1])
        numbers.append(tables.num_blocks.np[group, rows])
    here = np.concatenate(
        [np.concatenate(where + counts).view(np.uint8), np.concatenate(what + numbers).view(np.uint8)]
    )
    there = torch.from_numpy(here).pin_memory().to(device, non_blocking=True)
    places, values = there[: len(here) // 3 * 2].view(torch.int64), there[len(here) // 3 * 2 :].view(torch.int32)
    at = 0
    for table, rows in zip(tables.block_tables, where, strict=True):
        table.gpu.view(-1).index_copy_(0, places[at : at + len(rows)], values[at : at + len(rows)])
        table.clear_staged_writes()
        at += len(rows)
    num_blocks.view(-1).index_copy_(0, places[at:], values[at:])
    return True


@dataclass
class Batch:
    """The requests of a decode step, `Buffers.each` tokens of each."""

    req_ids: list[str]
    indices: dict[str, int]
    rows: np.ndarray
    descriptor: Any
    """vLLM's `BatchExecutionDescriptor` of the FULL graph that serves them."""
    sampling: tuple[bool, ...] | None
    """What their sampling launches; None where it is vLLM's whole sampler."""
    inputs: Any
    """vLLM's `InputBatch`."""

    @property
    def count(self) -> int:
        return len(self.req_ids)

    def count_tokens(self, computed: np.ndarray) -> None:
        """Sets the lengths in `inputs` that vLLM's sampler reads on the host. computed: [R] tokens before this step."""
        have = computed[self.rows]
        self.inputs.num_computed_tokens_np = have
        self.inputs.seq_lens_cpu_upper_bound[: self.count] = torch.from_numpy(have + self.inputs.num_scheduled_tokens)


def begin(runner: Any, buffers: Buffers, req_ids: list[str], descriptor: Any) -> Batch:
    """The batch of those requests; nothing on the GPU is touched yet."""
    states, count, each = runner.req_states, len(req_ids), buffers.each
    used, drafts = count * each, np.full(count, each - 1, dtype=np.int32)
    rows = np.fromiter((states.req_id_to_index[name] for name in req_ids), dtype=np.int64, count=count)
    padded, tokens, inputs = descriptor.num_reqs or count, descriptor.num_tokens, runner.input_buffers
    input_batch = vllm.parts().InputBatch(
        req_ids=req_ids,
        num_reqs=count,
        num_reqs_after_padding=padded,
        idx_mapping=buffers.rows[:count],
        idx_mapping_np=rows,
        expanded_idx_mapping=buffers.expanded[:used],
        expanded_local_pos=buffers.local[:used],
        num_scheduled_tokens=drafts + 1,
        num_tokens=used,
        num_tokens_after_padding=tokens,
        num_draft_tokens=used - count,
        num_draft_tokens_per_req=drafts if each > 1 else None,
        query_start_loc=inputs.query_start_loc[: padded + 1],
        query_start_loc_np=np.minimum(np.arange(padded + 1, dtype=np.int32) * each, used),
        seq_lens=inputs.seq_lens[:padded],
        seq_lens_cpu_upper_bound=torch.zeros(padded, dtype=torch.int32),
        dcp_local_seq_lens=None,
        num_computed_tokens_np=states.num_computed_tokens_np[rows],
        prefill_len_np=states.prefill_len.np[rows],
        num_computed_prefill_tokens_np=states.prefill_len.np[rows],
        is_prefilling_np=np.zeros(count, dtype=np.bool_),
        has_prefill=False,
        decode_graph_eligible=True,
        input_ids=inputs.input_ids[:tokens],
        positions=inputs.positions[:tokens],
        is_padding=inputs.is_padding[:tokens],
        logits_indices=buffers.places[:used],
        cu_num_logits=buffers.count[: count + 1],
        cu_num_logits_np=np.arange(count + 1, dtype=np.int32) * each,
        has_structured_output_reqs=False,
        prompt_lens=None,
    )
    indices = {name: place for place, name in enumerate(req_ids)}
    samples = sampling(runner.sampler, runner.prompt_logprobs_worker, rows) if each == 1 else None
    return Batch(req_ids, indices, rows, descriptor, samples, input_batch)


def sampling(sampler: Any, prompts: Any, rows: np.ndarray) -> tuple[bool, ...] | None:
    """Which kernels `Sampler.sample` launches for those rows, as it decides on the host; None for more than those.

    (any processing, temperature, min-p, top-k, top-p, top-p alone somewhere), each as
    `vllm/v1/worker/gpu/sample/{sampler,states}.py` has it.
    """
    bias, penalties, words = sampler.logits_processors
    thinking = sampler.thinking_budget_state
    more = (
        bias.use_logit_bias[rows].any()
        or penalties.use_penalty[rows].any()
        or words.num_bad_words.np[rows].any()
        or (thinking.enabled and thinking.use_thinking_budget[rows].any())
        or sampler.get_logprobs_dims(rows) is not None
        or prompts.uses_prompt_logprobs[rows].any()
        or prompts.token_id_scores
    )
    if more:
        return None
    states = sampler.sampling_states
    temperature, top_k, top_p = (getattr(states, name).np[rows] for name in ("temperature", "top_k", "top_p"))
    some_k, some_p = bool((top_k != states.vocab_size).any()), bool((top_p != 1.0).any())
    # The fused sampler has its own generator. A graph would have to contain the generator's state.
    drawn = not (states.any_greedy(rows) or states.any_explicit_seed(rows))
    if (sampler.use_flashinfer or sampler.use_xpu_sampler) and (some_k or some_p) and drawn:
        return None
    return (
        bool(sampler.needs_logits_processing[rows].any()),
        not bool(((temperature == 0.0) | (temperature == 1.0)).all()),
        bool((states.min_p.np[rows] != 0.0).any()),
        some_k,
        some_p,
        bool(some_p and ((top_k >= states.vocab_size) & (top_p < 1.0)).any()),
    )
