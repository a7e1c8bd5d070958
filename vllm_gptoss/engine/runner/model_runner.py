"""vLLM's model runner with a short way for steps that only decode.

vLLM prepares every step from scratch: about seven launches, five copies and their Python objects before the graph of
the model, and about twelve launches to sample. While the same requests decode, only the tokens change. This runner then
launches two small graphs around vLLM's FULL graph of the model, and one event. It updates vLLM's states on the GPU and
on the host as vLLM does, so each step may run either way. On several GPUs, each rank has such a runner.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from vllm_gptoss import _vllm, fallback
from vllm_gptoss._vllm import runner as vllm
from vllm_gptoss.engine.runner import captured_steps, eligibility, slices
from vllm_gptoss.engine.runner.batch import RING, Batch, Buffers, begin
from vllm_gptoss.engine.runner.graphs import Graphs
from vllm_gptoss.engine.runner.output import StepOutput
from vllm_gptoss.settings import Settings


@dataclass
class Taken:
    """A step after the launch of its model.

    hidden: [n, C] bf16; with drafts [t, C], with the states that the draft model reads, and how many drafts are next.
    """

    batch: Batch
    hidden: torch.Tensor
    finished: set[str]
    states: list[torch.Tensor] | None = None
    drafts: int = 0


class ShortWay:
    """The tensors and graphs of one runner, and the batch that decodes."""

    def __init__(self, runner: Any) -> None:
        self.runner, self.ranks = runner, runner.parallel_config.tensor_parallel_size
        self.buffers = Buffers(runner)
        self.graphs = Graphs(runner.device, captured_steps.MEMORY)
        self.batch: Batch | None = None
        self.events = [torch.cuda.Event(blocking=True) for _ in range(RING)]
        self.turn = 0
        self.has_failed = False
        self.has_begun = False

    def take(self, step: Any, is_dummy: bool = False) -> Taken | None:
        """Launches the model's part of `step`, a `SchedulerOutput`; None where vLLM is to do all of it.

        An exception before the step has changed anything that vLLM would not set again ends the short way, not the
        engine; a later one is raised, because the step cannot be repeated.
        """
        if self.has_failed:  # the object stays alive, because the last step's graphs may still run
            return None
        self.has_begun = False
        try:
            return self._take(step, is_dummy)
        except Exception as error:
            if self.has_begun:
                raise
            self.has_failed = True
            fallback.log("host", error)
            return None

    def _take(self, step: Any, is_dummy: bool) -> Taken | None:
        runner = self.runner
        if is_dummy or not eligibility.only_decodes(step, self.buffers.each):
            self.batch = None
            return None
        names = step.scheduled_cached_reqs.req_ids
        grew = any(step.scheduled_cached_reqs.new_block_ids)
        batch = self.batch
        if step.finished_req_ids or step.preempted_req_ids:
            runner.finish_requests(step)
        if batch is None or batch.req_ids != names:
            self.batch = None
            batch = self._begin(step, names)
            if batch is None:
                return None
        self._update(step, batch, grew)
        if self.batch is None:
            self._settle(batch)
        elif grew:
            self.buffers.add_blocks(runner)
        self.batch = batch
        prepare = self.graphs.work(("before", batch.count))
        prepare.run(self.graphs, lambda: captured_steps.before(runner, self.buffers, batch))
        runner.kv_connector.pre_forward(step, batch.inputs)
        made = runner.cudagraph_manager.run_fullgraph(batch.descriptor)
        runner.kv_connector.finish_forward()
        if self.buffers.each == 1:
            return Taken(batch, made[: batch.count], step.finished_req_ids)
        batch.inputs.has_structured_output_reqs = step.has_structured_output_requests
        hidden, states = made if runner.use_aux_hidden_state_outputs else (made, None)
        drafts = 0 if step.skip_drafts else step.num_spec_tokens_to_schedule
        return Taken(batch, hidden, step.finished_req_ids, states, drafts)

    def _begin(self, step: Any, names: list[str]) -> Batch | None:
        """The batch of these requests. None if a request is still in prefill or has a LoRA adapter, or if no FULL graph
        fits the batch."""
        runner, count = self.runner, len(names)
        if runner.lora_config and runner.lora_state.get_activate_loras(names):
            return None
        states = runner.req_states
        for name, computed in zip(names, step.scheduled_cached_reqs.num_computed_tokens, strict=True):
            if computed < states.prefill_len.np[states.req_id_to_index[name]]:
                return None
        each, full = self.buffers.each, vllm.parts().FULL
        descriptor = runner.cudagraph_manager.dispatch(count, count * each, each, 0, max_query_len=each)
        if descriptor.cg_mode != full:
            return None
        if each > 1:  # else the draft's first pass reads attention metadata, which there is none of
            first = runner.speculator.prefill_cudagraph_manager.dispatch(count, descriptor.num_tokens, each, 0)
            if first.cg_mode != full:
                return None
        batch = begin(runner, self.buffers, list(names), descriptor)
        if runner.lora_config:  # as vLLM's step: its LoRA kernels read on the host that no token has an adapter
            tokens = batch.inputs.num_scheduled_tokens
            runner._set_active_loras(*runner.lora_state.make_lora_inputs(names, batch.rows, tokens))
        return batch

    def _update(self, step: Any, batch: Batch, grew: bool) -> None:
        """Updates all rows at once, as `update_requests` does one by one, without cases that do not occur here.

        grew: whether the step brings new cache blocks.
        """
        runner, known = self.runner, step.scheduled_cached_reqs
        if step.new_block_ids_to_zero or step.kv_cache_block_copies:
            self.has_begun = True
            runner.update_requests(step)
            return
        states = runner.req_states
        states.num_computed_tokens_np[batch.rows] = known.num_computed_tokens
        np.minimum(states.num_computed_tokens_np, states.prefill_len.np, out=states.num_computed_prefill_tokens)
        self.has_begun = True
        if grew:
            for row, blocks in zip(batch.rows.tolist(), known.new_block_ids, strict=True):
                if blocks is not None:
                    runner.block_tables.append_block_ids(row, blocks, overwrite=False)

    def _settle(self, batch: Batch) -> None:
        """Puts a batch that begins where the graphs look."""
        runner, buffers = self.runner, self.buffers
        buffers.fill_blocks(runner)
        buffers.fill(runner, batch)
        # Clears the rows of a larger batch before, and counts those of this one for the next.
        runner.block_tables.gather_block_tables(
            batch.inputs.idx_mapping,
            num_reqs_padded=batch.inputs.num_reqs_after_padding,
            num_computed_tokens=runner.req_states.num_computed_tokens.gpu,
        )

    def sample(self, taken: Taken) -> StepOutput:
        """Launches the rest of a step."""
        batch, turn = taken.batch, self.turn
        hidden, room = taken.hidden, self.buffers.logits
        logits = None if room is None else captured_steps.gather_logits(self.runner, hidden, room)
        made = self.graphs.work(("after", batch.count, batch.sampling))
        made.run(self.graphs, lambda: captured_steps.after(self.runner, self.buffers, batch, hidden, logits))
        self.events[turn].record()
        self.turn = (turn + 1) % RING
        tokens = self.buffers.ring.np[turn, : batch.count]
        moved = self.runner.kv_connector.post_forward(taken.finished)
        return StepOutput(batch.req_ids, batch.indices, tokens, self.events[turn], moved)


class GptOssModelRunner(GPUModelRunner):
    """As vLLM's Model Runner V2."""

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self.short_way: ShortWay | None = None
        self.taken: Taken | None = None
        self.wish = "gptoss" if Settings.load(vllm_config.additional_config).host == "gptoss" else "auto"
        check = eligibility.check_configuration
        self.may_replay = bool(fallback.attempt("host", self.wish, lambda: check(vllm_config, self.wish)))

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> Any:
        """As upstream; what knew the tensors that are replaced is dropped."""
        self._drop()
        return super().initialize_kv_cache(*args, **kwargs)

    def reset_lora_state(self) -> None:
        """As upstream, which calls it whenever weights were replaced: our graphs know those of the logits."""
        super().reset_lora_state()
        if self.short_way is not None:
            self.short_way.graphs = Graphs(self.device, captured_steps.MEMORY)

    def shutdown(self) -> None:
        """As upstream, which frees what the graphs use."""
        self._drop()
        super().shutdown()

    def _drop(self) -> None:
        """Our graphs know vLLM's tensors by address, and a step's output is in memory of its graphs."""
        self.short_way = self.taken = None

    def capture_model(self, *args: Any, **kwargs: Any) -> Any:
        """As upstream; then it is known whether there is a short way."""
        self._drop()
        captured = super().capture_model(*args, **kwargs)
        if not kwargs.get("profile_only") and self.may_replay:
            with torch.inference_mode():
                self.short_way = fallback.attempt("host", self.wish, self._decide)
        return captured

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """As upstream: runs the model, `sample_tokens` gives the tokens."""
        self.taken = None
        short, is_dummy = self.short_way, bool(kwargs.get("dummy_run"))
        if short is not None:
            with torch.inference_mode():
                self.taken = fallback.or_end("host", short.ranks, lambda: short.take(scheduler_output, is_dummy))
            if self.taken is not None:
                return None
        return super().execute_model(scheduler_output, *args, **kwargs)

    def _decide(self) -> ShortWay:
        """The short way.

        Raises:
            UnavailableError: this runner has none.
        """
        if why := eligibility.why_not(self):
            raise fallback.UnavailableError(why)
        say = _vllm.init_logger("vllm.gptoss").info
        say("host: decode steps are replayed (GPTOSS_HOST=stock turns it off)")
        if self.kv_connector is not vllm.parts().NO_OP_KV_CONNECTOR:
            say("host: vLLM plans every step, and runs those in which the KV connector loads or stores")
        if why := slices.ask_short():
            say("host: the engine's threads keep the time slices they have (%s)", why)
        return ShortWay(self)

    def sample_tokens(self, grammar_output: Any) -> Any:
        """As upstream. `get_output` of the returned object waits for the tokens."""
        taken, self.taken = self.taken, None
        if taken is None:
            return super().sample_tokens(grammar_output)
        short = self.short_way
        assert short is not None
        if grammar_output is None and taken.batch.sampling is not None:
            with torch.inference_mode():
                return fallback.or_end("host", short.ranks, lambda: short.sample(taken))
        # Drafts, logprobs, penalties and the like: vLLM's own sampling, of the batch as it knows one.
        taken.batch.count_tokens(self.req_states.num_computed_tokens_np)
        self.execute_model_state = vllm.parts().ExecuteModelState(
            input_batch=taken.batch.inputs,
            attn_metadata=None,
            slot_mappings_by_layer=None,
            hidden_states=taken.hidden,
            aux_hidden_states=taken.states,
            dp_sync_state=None,
            finished_req_ids=taken.finished,
            ec_connector_output=None,
            cudagraph_stats=None,
            num_spec_tokens_to_schedule=taken.drafts,
        )
        return super().sample_tokens(grammar_output)
