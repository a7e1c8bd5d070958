"""The sampled tokens of a step on their way to the scheduler."""

from __future__ import annotations

from typing import Any

from vllm.v1.outputs import AsyncModelRunnerOutput

from vllm_gptoss._vllm import runner as vllm


class StepOutput(AsyncModelRunnerOutput):
    """One token for each request, [n] int64 in pinned memory as soon as `ready` has happened.

    moved: the `KVConnectorOutput` of the step; None without a KV connector.
    """

    def __init__(self, req_ids: list[str], indices: dict[str, int], tokens: Any, ready: Any, moved: Any = None) -> None:
        self.req_ids, self.indices, self.tokens, self.ready, self.moved = req_ids, indices, tokens, ready, moved

    def get_output(self) -> Any:
        """Waits for the step; as `AsyncOutput.get_output` of `vllm/v1/worker/gpu/async_utils.py` gives it."""
        self.ready.synchronize()
        return vllm.parts().ModelRunnerOutput(
            req_ids=self.req_ids,
            req_id_to_index=self.indices,
            sampled_token_ids=[[token] for token in self.tokens.tolist()],
            kv_connector_output=self.moved,
        )

    def get_kv_connector_output(self) -> Any:
        """As `get_output` returns it: vLLM asks for it where that has raised."""
        return self.moved
