"""Validation of requests. In: the JSON of a body. Out: a checked `CreateRequest`, or an `ApiError` with the field.

`create` reads the whole body, `items` its `input`, `tool_params` its `tools` and `tool_choice`. Nothing here does I/O
or depends on this server's tools and limits.
"""
