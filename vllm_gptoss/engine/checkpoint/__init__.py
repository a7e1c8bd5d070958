"""What a checkpoint must hold, and a refusal that names what it lacks.

In: config.json, files' headers, tensors as vLLM loads them. Out: the same tensors, or an error before anything is
served. `names` is the table, `headers` reads files, `check` compares, `load` sits in vLLM's loading.
"""
