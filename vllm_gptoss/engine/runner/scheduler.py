"""vLLM's scheduler, with a short way for steps in which all requests only decode.

vLLM spends two thirds of a step's scheduling on block allocation: for each request and cache group it computes the
blocks of the next token. In 15 of 16 steps a request needs no block, which a few comparisons of its fields show. If no
request waits and none is in prefill, the other decisions are constant: each running request gets one token.

The update after a step is equally short: it appends the tokens of continuing requests and builds their output messages.
vLLM's own code handles every other request.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from vllm_gptoss import fallback
from vllm_gptoss._vllm import runner as vllm
from vllm_gptoss.engine.runner import slices

NEVER = 2**62
"""Sentinel larger than any step number: vLLM skips a running request if its next decode step is later."""
NOTHING_SPECIAL = {"num_lookahead_tokens": 0}
"""The keywords of `allocate_slots` for a running request without drafts."""


class QuickKVCacheManager(KVCacheManager):
    """As vLLM's, of full attention and sliding windows with blocks of one size."""

    size: int
    groups: tuple[tuple[Any, int], ...]
    """A manager of each group and its window; 0: all keys."""
    quiet: dict[str, int]
    """By request, how many computed tokens it may have and still need nothing; absent if not computed yet."""

    def allocate_slots(self, request: Any, num_new_tokens: int, *args: Any, **kwargs: Any) -> Any:
        """As upstream: the new blocks of the request, None where there are too few."""
        if num_new_tokens == 1 and not args and kwargs == NOTHING_SPECIAL:
            if self.needs_nothing(request):
                return self.empty_kv_cache_blocks
            if request.request_id in self.quiet and self.block_pool.get_num_free_blocks() >= len(self.groups):
                return self.create_kv_cache_blocks(self.grow(request))
        return super().allocate_slots(request, num_new_tokens, *args, **kwargs)

    def free(self, request: Any) -> None:
        """As upstream, for requests that end and that are preempted."""
        self.quiet.pop(request.request_id, None)
        super().free(request)

    def grow(self, request: Any) -> tuple[list[Any], ...]:
        """As `allocate_slots` for the next token of a running request; there must be a free block for each group."""
        computed, name, size = request.num_computed_tokens, request.request_id, self.size
        processed = max(0, computed - request.num_in_flight_tokens)
        for manager, window in self.groups:
            if window:
                manager.remove_skipped_blocks(name, processed)
        new = tuple(
            manager.allocate_new_blocks(name, computed + 1, computed + 1)
            if len(manager.req_to_blocks[name]) * size <= computed
            else []
            for manager, _ in self.groups
        )
        if self.enable_caching:
            self.coordinator.cache_blocks(request, min(computed + 1, request.num_tokens))
        return new

    def cache_whole(self, request: Any) -> None:
        """Hashes and caches a block that the request's last token has filled, as upstream.

        `Request.append_output_token_ids`, and `cache_blocks` of `vllm/v1/core/single_type_kv_cache_manager.py`.
        """
        hashes, name = request.block_hashes, request.request_id
        if (len(hashes) + 1) * self.size <= len(request._all_token_ids):
            request.update_block_hashes()
        known = request.num_computed_tokens - request.num_in_flight_tokens
        whole = min(known // self.size, len(hashes))
        if any(whole > manager.num_cached_block.get(name, 0) for manager, _ in self.groups):
            self.cache_blocks(request, known)

    def needs_nothing(self, request: Any) -> bool:
        """Whether the slot of one more token is there, and nothing is to be freed or cached, as
        `vllm/v1/core/single_type_kv_cache_manager.py` finds it in `remove_skipped_blocks`, `allocate_new_blocks` and
        `cache_blocks`."""
        computed, name, size = request.num_computed_tokens, request.request_id, self.size
        if computed < self.quiet.get(name, 0):
            return True
        whole = min(computed + 1, request.num_tokens) // size if self.enable_caching else 0
        until = self.max_model_len
        for manager, window in self.groups:
            blocks = manager.req_to_blocks.get(name)
            if not blocks:
                return False
            cached = manager.num_cached_block.get(name, 0)
            if len(blocks) * size <= computed or whole > cached:
                self.quiet[name] = 0
                return False
            until = min(until, len(blocks) * size, (cached + 1) * size - 1 if self.enable_caching else until)
            if window:
                passed = max(0, (computed - request.num_in_flight_tokens - window + 1) // size)
                if passed and not blocks[passed - 1].is_null:
                    self.quiet[name] = 0
                    return False
                until = min(until, (passed + 1) * size + window - 1)
        self.quiet[name] = until
        return True


def quick(theirs: Any) -> QuickKVCacheManager:
    """A manager over the same blocks.

    Raises:
        UnavailableError: its groups are of other kinds.
    """
    groups = vllm.cache_groups(theirs)
    if groups is None:
        raise fallback.UnavailableError("caches of other kinds than full attention and windows")
    ours = object.__new__(QuickKVCacheManager)
    ours.__dict__.update(vars(theirs))
    ours.groups = groups
    ours.size = theirs.block_pool.hash_block_size
    ours.quiet = {}
    return ours


class GptOssScheduler(AsyncScheduler):
    """As vLLM's for steps that are scheduled ahead."""

    kv_cache_manager: Any
    running: list[Any]
    num_executed_steps: int
    max_num_scheduled_tokens: int
    current_step: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.has_short_way = False
        self.nobody: Any = None
        """vLLM's last output for a step without waiting requests and without requests left to schedule."""
        self.is_calm = False
        """Whether the last two such outputs were equal and no request was added since. The output is then reused."""
        # Both keep the manager that they were given. A KV connector reads every request of a step as it is planned.
        if self.connector is None and self.aux_output_connector is None:
            fallback.attempt("host: scheduler", "auto", self._use_short_way)

    def _use_short_way(self) -> None:
        """Takes the quick manager, and where nothing else is scheduled the short way.

        Raises:
            UnavailableError: the cache has groups of other kinds.
        """
        is_plain, self.kv_cache_manager = self._is_plain(), quick(self.kv_cache_manager)
        if self.parallel_config.world_size > 1:  # the workers are other processes; they log a failure
            slices.ask_short()
        self.has_short_way = is_plain

    def _is_plain(self) -> bool:
        """Whether nothing but tokens and blocks is ever scheduled."""
        return (
            self.ec_connector is None
            and not self.lora_config
            and not self.num_spec_tokens
            and self.dynamic_sd_lookup is None
            and not self.need_mamba_block_aligned_split
            and not self.use_pp
            and bool(self.use_v2_model_runner)
            and getattr(self, "local_prefill_interval", 1) <= 1  # not in 0.32
            and not (self.perf_metrics and self.perf_metrics.is_enabled())
        )

    def schedule(self, throttle_prefills: bool = False) -> Any:
        """As upstream: the next step, a `SchedulerOutput`."""
        found = None
        if self.has_short_way and self._pause_state.name != "PAUSED_ALL":
            try:
                found = self._decoding()
            except Exception as error:  # before anything is planned
                self.has_short_way = False
                fallback.log("host: scheduler", error)
        self.is_calm &= found is not None and found[-1]
        return super().schedule(throttle_prefills) if found is None else self._schedule(throttle_prefills, *found)

    def _decoding(self) -> tuple[list[Any], list[Any], bool] | None:
        """Returns (requests that get a token, those that need blocks, whether no other request needs scheduling).

        None if vLLM might schedule them differently: later requests may be preempted for their blocks, or get the rest
        of the token budget.
        """
        limit, blocks = self.max_model_len - 2, self.kv_cache_manager
        quiet, next_step = blocks.quiet, self.current_step + 1
        ready, asking, others = [], [], False
        for request in self.running:
            computed, ahead = request.num_computed_tokens, request.num_output_placeholders
            if ahead and computed + 2 - ahead >= request.num_prompt_tokens + request.max_tokens:
                continue  # its last token is under way
            if (
                request.is_prefill_chunk
                or len(request._all_token_ids) + ahead - computed != 1
                or computed > limit
                or request.spec_token_ids
                or request.mm_features
                or request.next_decode_eligible_step > next_step
            ):
                others = True
                continue
            if others:
                return None
            ready.append(request)
            if computed >= quiet.get(request.request_id, 0) and not blocks.needs_nothing(request):
                asking.append(request)
        alone = not others and not self.waiting and not self.kv_holding_waiting
        # A token needs at most one block of each group; with too few blocks, vLLM preempts a request.
        enough = blocks.block_pool.get_num_free_blocks() >= len(asking) * len(blocks.groups)
        in_turn = alone or self.policy.name == "FCFS"
        return (ready, asking, alone) if ready and enough and in_turn and len(ready) <= self._budget() else None

    def _budget(self) -> int:
        """Most tokens of a step."""
        return min(self.max_num_scheduled_tokens, int(self.scheduler_config.max_num_batched_tokens))

    def _schedule(self, throttle_prefills: bool, ready: list[Any], asking: list[Any], alone: bool) -> Any:
        """Schedules one token for each of `ready`. vLLM schedules other requests with the remaining token budget."""
        blocks = {}
        for request in asking:
            new = self.kv_cache_manager.grow(request)
            if any(new):
                blocks[request.request_id] = tuple([block.block_id for block in group] for group in new)
        step = self._of_nobody(throttle_prefills, blocks) if alone else self._of_others(throttle_prefills, ready)
        self._add(step, ready, blocks)
        self._count(step, ready)
        return step

    def _of_others(self, throttle_prefills: bool, ready: list[Any]) -> Any:
        """vLLM's step for all but those."""
        budget = self.max_num_scheduled_tokens
        self.max_num_scheduled_tokens = self._budget() - len(ready)
        for request in ready:
            request.next_decode_eligible_step = NEVER
        try:
            return super().schedule(throttle_prefills)
        finally:
            self.max_num_scheduled_tokens = budget

    def _of_nobody(self, throttle_prefills: bool, blocks: Mapping[str, Any]) -> Any:
        """An empty `SchedulerOutput` of vLLM, with the finished requests. blocks: the new cache blocks of this step.

        With one request, vLLM's call takes two thirds of the planning time, and most outputs equal the last one.
        """
        ended = self.finished_req_ids or self.reset_preempted_req_ids
        if self.is_calm and not ended and not blocks:
            self.current_step += 1
            self.kv_cache_manager.new_step_starts()
            return _again(self.nobody)
        running, self.running = self.running, []
        try:
            step = super().schedule(throttle_prefills)
        finally:
            self.running = running
        self.is_calm = not ended and step == self.nobody and self._pause_state.name == "UNPAUSED"
        self.nobody = _again(step)
        return step

    def _add(self, step: Any, ready: list[Any], blocks: dict[str, tuple[list[int], ...]]) -> None:
        """Puts the requests that decode before all others of a step."""
        if not step.total_num_scheduled_tokens:
            if hasattr(self, "num_executed_steps"):  # not in 0.32
                self.num_executed_steps += 1
            if self.defer_block_free:
                self.sched_step_seq += 1
        names = [request.request_id for request in ready]
        step.num_scheduled_tokens = dict.fromkeys(names, 1) | step.num_scheduled_tokens
        step.total_num_scheduled_tokens += len(names)
        known = step.scheduled_cached_reqs
        known.req_ids = names + known.req_ids
        new = [blocks.get(name) for name in names] if blocks else [None] * len(names)
        known.new_block_ids = new + known.new_block_ids
        known.num_computed_tokens = [request.num_computed_tokens for request in ready] + known.num_computed_tokens
        made = [len(request._output_token_ids) + request.num_output_placeholders for request in ready]
        known.num_output_tokens = made + known.num_output_tokens

    def _count(self, step: Any, ready: list[Any]) -> None:
        """As `_update_after_schedule`, of the scheduler and of the asynchronous one, for a token of each request."""
        next_step, no_drafts = self.current_step + self.decode_stagger, self._spec_token_placeholders
        if self.defer_block_free:
            for request in ready:
                request.last_sched_seq = self.sched_step_seq
        self._inflight_prefills.difference_update(ready)
        for request in ready:
            if request.structured_output_request is not None:
                step.has_structured_output_requests = True
                step.pending_structured_output_tokens |= request.num_output_placeholders > 0
            request.num_computed_tokens += 1
            request.num_in_flight_tokens += 1
            request.num_output_placeholders += 1
            request.spec_token_ids = no_drafts
            request.next_decode_eligible_step = next_step

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]:
        """As upstream: what each client gets, by its number."""
        if self.has_short_way and _says_tokens_only(model_runner_output):
            return self._update(scheduler_output, model_runner_output)
        found: dict[int, Any] = super().update_from_output(scheduler_output, model_runner_output)
        return found

    def _update(self, step: Any, output: Any) -> dict[int, Any]:
        """Appends tokens to continuing requests. vLLM's own method handles the remaining requests of the step."""
        said: dict[int, list[Any]] = {}
        scheduled = step.num_scheduled_tokens
        step.num_scheduled_tokens = self._go_on(scheduled, output, said)
        try:
            theirs = super().update_from_output(step, output)
        finally:
            step.num_scheduled_tokens = scheduled
        ours = {client: vllm.said().EngineCoreOutputs(outputs=outputs) for client, outputs in said.items()}
        for client, message in theirs.items():
            if client in ours:
                message.outputs = ours[client].outputs + message.outputs
            elif ours and not message.outputs and not message.finished_requests:
                continue  # carries only statistics: vLLM appended no tokens
            ours[client] = message
        self._move_statistics(theirs, ours)
        return ours

    def _move_statistics(self, theirs: dict[int, Any], ours: dict[int, Any]) -> None:
        """Moves the statistics to one client: the first that receives tokens, if there is one."""
        for message in theirs.values():
            if message.scheduler_stats is not None:
                statistics, message.scheduler_stats = message.scheduler_stats, None
                first = next(iter(ours.values()))
                first.scheduler_stats = statistics
                return

    def _go_on(self, scheduled: dict[str, int], output: Any, said: dict[int, list[Any]]) -> dict[str, int]:
        """Appends tokens to continuing requests, and fills `said` by client. Returns the other entries of `scheduled`.

        As `update_from_output`, `_update_request_with_output` and `check_stop` do it.
        """
        left: dict[str, int] = {}
        requests, places, sampled = self.requests, output.req_id_to_index, output.sampled_token_ids
        longest, running, token = self.max_model_len - 1, vllm.said().RUNNING, vllm.said().EngineCoreOutput
        cache = self.kv_cache_manager.cache_whole if self.kv_cache_manager.enable_caching else None
        for name, count in scheduled.items():
            request = requests.get(name)
            if request is None or count != 1:
                left[name] = count
                continue
            tokens, params = sampled[places[name]], request.sampling_params
            every, made = request._all_token_ids, request._output_token_ids
            if (
                len(tokens) != 1
                or request.status is not running
                or request.num_output_placeholders < 1
                or request.num_stale_output_tokens
                or tokens[0] in params._all_stop_token_ids
                or len(made) + 1 >= request.max_tokens
                or len(every) >= longest
                or request.events
                or request.prefill_stats is not None
                or request.structured_output_request is not None
                or params.logprobs is not None
                or params.repetition_detection is not None
                or request.trace_headers is not None
            ):
                left[name] = count
                continue
            made.append(tokens[0])
            every.append(tokens[0])
            request.num_in_flight_tokens -= 1
            request.num_output_placeholders -= 1
            if cache is not None:
                cache(request)
            outputs = said.get(request.client_index)
            if outputs is None:
                outputs = said[request.client_index] = []
            outputs.append(token(name, tokens))
        return left


def _again(step: Any) -> Any:
    """An empty `SchedulerOutput` with the contents of `step`, to which requests may be added."""
    again, known = object.__new__(type(step)), object.__new__(type(step.scheduled_cached_reqs))
    vars(known).update(vars(step.scheduled_cached_reqs))
    vars(again).update(vars(step), scheduled_cached_reqs=known)
    return again


def _says_tokens_only(output: Any) -> bool:
    """Whether a `ModelRunnerOutput` contains only tokens, or outputs of requests with further options."""
    return (
        bool(output.sampled_token_ids)
        and output.pooler_output is None
        and output.kv_connector_output is None
        and output.ec_connector_output is None
        and output.num_nans_in_logits is None
        and output.sampling_masks is None
        and output.aux_output_connector_output is None
        and not output.prompt_logprobs_dict
        and not output.prompt_token_id_logprobs_dict
    )
