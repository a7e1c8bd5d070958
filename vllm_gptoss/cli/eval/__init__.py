"""Accuracy of a served model with every answer accounted for: `vllm-gptoss eval`.

A question (`questions`, `data`) becomes requests of one of two APIs (`apis`), which `client` sends with bounds and
bounded retries. `dialogue` runs a question's turns and tool calls, `judge` says what became of it, `record` keeps one
line a sample, `runner` does many at once. `summary`, `panel` and `compare` read what was kept.
"""
