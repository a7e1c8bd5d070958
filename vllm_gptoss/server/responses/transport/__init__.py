"""HTTP and WebSocket. In: bytes of a client. Out: calls of `run.service`, and its events and errors as bytes.

`response_routes`, `conversation_routes` and `container_routes` are the three families of paths; `http`, `event_stream`,
`paging` and `openapi` are shared. Nothing here knows Harmony or the engine.
"""
