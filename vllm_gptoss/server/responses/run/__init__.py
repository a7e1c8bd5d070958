"""One response from request to last event. In: a `CreateRequest` and a caller. Out: batches of events, then the body.

`transport` calls `service`. `build_job` makes a `Job`; `loop` generates and runs tools, in turns; `listener` reads
tokens; `item_writers` and `tool_writers` convert them to items and events. `background` runs responses without a
connection, `compaction` shortens a conversation, `engine` is vLLM or a replay.
"""
