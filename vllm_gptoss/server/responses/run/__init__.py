"""One response from request to last event. In: a `CreateRequest` and a caller. Out: batches of events, then the body.

`service` is what `transport` calls. `build_job` gathers everything into a `Job`; `loop` generates, runs tools and
generates again; `listener` hears tokens; `item_writers` and `tool_writers` make items and events of them. `background`
runs a response without a listener, `compaction` shortens a conversation, `engine` is vLLM or a replay.
"""
