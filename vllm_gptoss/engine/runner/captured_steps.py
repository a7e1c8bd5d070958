"""What a decode step launches before the model and after it, by vLLM's own functions.

Both mirror `GPUModelRunner` of `vllm/v1/worker/gpu/model_runner.py` for a batch that only decodes: `prepare_inputs`,
`prepare_attn` and the attention metadata before; `sample` and `postprocess_sampled` after.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from vllm_gptoss._vllm import runner as vllm
from vllm_gptoss.engine.runner.batch import LOGITS_BYTES, RING, Batch, Buffers
from vllm_gptoss.engine.runner.graphs import Launches

MEMORY = LOGITS_BYTES + 2**24
"""Memory of a graph's logits and of the buffers of sampling."""


def before(runner: Any, buffers: Buffers, batch: Batch) -> Launches:
    """Positions, lengths, input tokens, block tables, slots and attention's plan of the next tokens of each request."""
    parts, states, inputs, tables = vllm.parts(), runner.req_states, runner.input_buffers, buffers.tables
    count, have = batch.count, batch.inputs
    rows, starts, computed = buffers.rows[:count], have.query_start_loc, states.num_computed_tokens.gpu

    def launch() -> None:
        parts.prepare_pos_seq_lens(rows, starts, computed, inputs.positions, inputs.seq_lens)
        parts.combine_sampled_and_draft_tokens(
            inputs.input_ids,
            rows,
            states.last_sampled_tokens,
            starts,
            have.seq_lens,
            buffers.prefill_len,
            states.draft_tokens,
            have.cu_num_logits,
            count * buffers.each,
            1,
        )
        tables._num_dirty_rows = 0  # of this copy: rows that a larger batch left are cleared when a batch begins
        blocks = tables.gather_block_tables(
            rows, num_reqs_padded=have.num_reqs_after_padding, num_computed_tokens=computed
        )
        slots = tables.compute_slot_mappings(
            rows, starts, have.positions, num_tokens_padded=have.num_tokens_after_padding
        )
        if buffers.each > 1:  # of a draft's own plan, which vLLM makes from it: as when its graphs were captured
            have.seq_lens_cpu_upper_bound[:count] = runner.max_model_len
        runner.model_state.prepare_attn(have, parts.FULL, blocks, slots, runner.attn_groups, runner.kv_cache_config)

    return Launches(launch, captures=True)


def gather_logits(runner: Any, hidden: Tensor, room: Tensor) -> Tensor:
    """The logits [n, V] of hidden [n, C] bf16, on several GPUs; in `room` where they fit.

    The only collectives of a step are those in the model's FULL graph and the all-gather of `compute_logits`, in this
    order and with the same rows on vLLM's path. So a rank may replay a step that another rank does not, for example
    after a failed capture. The plugin's graphs contain no collective: while NCCL records one, it may register the
    buffers with the peers, and the peers then must record the same graph.
    """
    logits: Tensor = runner.model.compute_logits(hidden)
    return room[: len(logits)].copy_(logits) if len(logits) <= len(room) else logits


def after(runner: Any, buffers: Buffers, batch: Batch, hidden: Tensor, gathered: Tensor | None = None) -> Launches:
    """Logits, the sampled token of each request, its way into vLLM's states and into the ring.

    hidden: [n, C] bf16, the first rows of the buffer that the model's graphs write; gathered: on several GPUs their
    logits.
    """
    parts, states, have = vllm.parts(), runner.req_states, batch.inputs
    count, rows = batch.count, buffers.rows[: batch.count]
    ring, slot = buffers.ring.uva()[:, :count], buffers.slot
    lengths = have.seq_lens_cpu_upper_bound.numpy()
    assert batch.sampling is not None
    processed, *_, some_k, some_p, _ = batch.sampling

    def launch() -> None:
        logits = runner.model.compute_logits(hidden) if gathered is None else gathered
        sampled, _ = buffers.sampler.sample(
            logits,
            rows,
            rows,
            batch.rows,
            have.positions[:count],
            have.input_ids[:count],
            have.expanded_local_pos,
            lengths,
        )
        parts.post_update(
            rows,
            states.num_computed_tokens.gpu,
            states.last_sampled_tokens,
            runner.sampler.penalties_state.output_bin_counts,
            sampled.view(-1, 1),
            buffers.ones[:count],
            buffers.zeros[:count],
            have.query_start_loc,
            states.all_token_ids.gpu,
            states.total_len.gpu,
            None,
            states.draft_tokens,
        )
        ring.index_copy_(0, slot, sampled.view(1, -1))
        slot.add_(1).remainder_(RING)

    # Top-k and top-p keep scratch memory that grows with the batch: a graph would know it by a stale address.
    fits = count * runner.vocab_size * (6 if processed else 2) <= LOGITS_BYTES
    return Launches(launch, captures=fits and not some_k and not some_p)
