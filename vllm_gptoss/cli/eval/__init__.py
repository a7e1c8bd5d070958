"""Accuracy of a served model, with the outcome of every answer: `vllm-gptoss eval`.

A question (`questions`, `data`) becomes requests of one of two APIs (`client`). `run` sends many at once, `judge`
decides the outcome, `record` stores one line a sample. `report` and `compare` read the stored samples.
"""
