"""A decode step with little of the processor: vLLM's model runner with a short way for batches that stay as they are.

In: the scheduler's step. Out: tokens, as vLLM's runner gives them. `worker` is what vLLM starts, `model_runner` takes
the short way or leaves a step to vLLM; `admit` says which and why; `batch` holds what stays from step to step; `work`
is what a step launches before and after the model, `graphs` replays it, `output` hands the tokens on.
"""
