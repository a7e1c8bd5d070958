"""Accuracy of a served model, with the fate of every answer: `vllm-gptoss eval`.

A question (`questions`, `data`) becomes requests of one of two APIs (`apis`), which `client` sends with bounds and
bounded retries. `dialogue` runs a question's turns and tool calls, `judge` decides its fate, `record` stores one line
a sample, `runner` does many at once. `summary`, `panel` and `compare` read the stored samples.
"""
