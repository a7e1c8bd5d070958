"""The `browser` tool of gpt-oss: `search`, `open` and `find`.

A call goes through `session` (the model's functions) to a backend (`backends/`) or the `fetch`er (behind `guard` and
`robots`), whose answer `markup` and `pdf` turn into a `page` and its numbered lines.
"""
