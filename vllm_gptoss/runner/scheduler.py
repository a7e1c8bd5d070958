"""vLLM's scheduler, with a short way for steps in which all requests only decode.

Two thirds of a step's scheduling ask, for each request, which blocks its next token needs, in every group of the cache.
Fifteen times of sixteen the answer is none. What vLLM's managers would look at says so in a few comparisons. Most of
the rest decides what is decided already where nobody waits and nobody reads a prompt: a token for everyone.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from vllm_gptoss import aside
from vllm_gptoss._vllm import runner as vllm

NOTHING_SPECIAL = {"num_lookahead_tokens": 0}
"""How the scheduler asks for a running request without drafts, in one call of its loop."""


class QuickKVCacheManager(KVCacheManager):
    """As vLLM's, of full attention and sliding windows with blocks of one size."""

    size: int
    groups: tuple[tuple[Any, int], ...]
    """A manager of each group and its window; 0: all keys."""

    def allocate_slots(self, request: Any, num_new_tokens: int, *args: Any, **kwargs: Any) -> Any:
        """As upstream: the new blocks of the request, None where there are too few."""
        if num_new_tokens == 1 and not args and kwargs == NOTHING_SPECIAL and self.needs_nothing(request):
            return self.empty_kv_cache_blocks
        return super().allocate_slots(request, num_new_tokens, *args, **kwargs)

    def needs_nothing(self, request: Any) -> bool:
        """Whether the slot of one more token is there, and nothing is to be freed or cached, as
        `vllm/v1/core/single_type_kv_cache_manager.py` finds it in `remove_skipped_blocks`, `allocate_new_blocks` and
        `cache_blocks`."""
        computed, name, size = request.num_computed_tokens, request.request_id, self.size
        whole = min(computed + 1, request.num_tokens) // size if self.enable_caching else 0
        for manager, window in self.groups:
            blocks = manager.req_to_blocks.get(name)
            if not blocks or len(blocks) * size <= computed:
                return False
            if whole > manager.num_cached_block.get(name, 0):
                return False
            if window:
                passed = (computed - request.num_in_flight_tokens - window + 1) // size
                if passed > 0 and not blocks[passed - 1].is_null:
                    return False
        return True


def quick(theirs: Any) -> QuickKVCacheManager:
    """A manager over the same blocks.

    Raises:
        NotHereError: its groups are of other kinds.
    """
    groups = vllm.cache_groups(theirs)
    if groups is None:
        raise aside.NotHereError("caches of other kinds than full attention and windows")
    ours = object.__new__(QuickKVCacheManager)
    ours.__dict__.update(vars(theirs))
    ours.groups = groups
    ours.size = theirs.block_pool.hash_block_size
    return ours


class GptOssScheduler(AsyncScheduler):
    """As vLLM's for steps that are scheduled ahead."""

    kv_cache_manager: Any
    running: list[Any]
    num_executed_steps: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.has_short_way = False
        if self.connector is None and self.aux_output_connector is None:  # both keep the manager they were given
            quicker = aside.attempt("host: scheduler", "auto", lambda: quick(self.kv_cache_manager))
            self.kv_cache_manager = quicker or self.kv_cache_manager
            self.has_short_way = quicker is not None and self._is_plain()

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
        )

    def schedule(self, throttle_prefills: bool = False) -> Any:
        """As upstream: the next step, a `SchedulerOutput`."""
        nobody_waits = not self.waiting and not self.kv_holding_waiting and self._pause_state.name == "UNPAUSED"
        if self.has_short_way and nobody_waits and not throttle_prefills and (found := self._decoding()):
            return self._schedule(*found)
        return super().schedule(throttle_prefills)

    def _decoding(self) -> tuple[list[Any], list[Any]] | None:
        """(requests that get a token, those of them that need blocks); None where that is not all there is to do."""
        limit, needs_nothing = self.max_model_len - 2, self.kv_cache_manager.needs_nothing
        ready, asking = [], []
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
                or request.next_decode_eligible_step > self.current_step + 1
            ):
                return None
            ready.append(request)
            if not needs_nothing(request):
                asking.append(request)
        budget = min(self.max_num_scheduled_tokens, self.scheduler_config.max_num_batched_tokens)
        # A token crosses into one block of each group at most; with too few, somebody is to be preempted.
        enough = self.kv_cache_manager.block_pool.get_num_free_blocks() >= len(asking) * len(
            self.kv_cache_manager.groups
        )
        return (ready, asking) if ready and len(ready) <= budget and enough else None

    def _schedule(self, ready: list[Any], asking: list[Any]) -> Any:
        """The step of these requests. vLLM schedules an empty one, and with it all that is not theirs."""
        blocks = {}
        for request in asking:
            found = self.kv_cache_manager.allocate_slots(request, 1, **NOTHING_SPECIAL)
            assert found is not None
            blocks[request.request_id] = found.get_block_ids(allow_none=True)
        running, self.running = self.running, []
        try:
            step = super().schedule()
        finally:
            self.running = running
        names = [request.request_id for request in ready]
        step.num_scheduled_tokens = dict.fromkeys(names, 1)
        step.total_num_scheduled_tokens = len(names)
        known = step.scheduled_cached_reqs
        known.req_ids = names
        known.new_block_ids = [blocks.get(name) for name in names] if blocks else [None] * len(names)
        known.num_computed_tokens = [request.num_computed_tokens for request in ready]
        known.num_output_tokens = [
            len(request._output_token_ids) + request.num_output_placeholders for request in ready
        ]
        if hasattr(self, "num_executed_steps"):  # not in 0.32
            self.num_executed_steps += 1
        if self.defer_block_free:
            self.sched_step_seq += 1
        self._update_after_schedule(step)
        return step
