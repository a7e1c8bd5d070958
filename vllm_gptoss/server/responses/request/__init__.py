"""What a client may ask for. In: the JSON of a body. Out: a checked `CreateRequest`, or an `ApiError` with the field.

`create` reads the whole body, `items` its `input`, `tool_params` its `tools` and `tool_choice`. Nothing here waits,
looks anything up, or knows this server's tools and limits.
"""
