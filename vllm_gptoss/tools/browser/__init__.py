"""The `browser` tool of gpt-oss: `search`, `open` and `find`.

A call goes through `session` (the model's functions) to a backend (`backends/`) or the `fetch`er (behind `guard` and
`robots`); `markup` and `pdf` turn its answer into a `page` and its numbered lines.
"""
