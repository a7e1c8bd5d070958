"""Decode steps with less host time: vLLM's worker, model runner and scheduler with a short way for unchanged batches.

vLLM starts `worker`. `model_runner` takes the short way or calls vLLM's path; `eligibility` decides. `batch` has the
state that is constant between steps, `captured_steps` the launches before and after the model, `graphs` replays them,
and `output` returns the tokens.
"""
