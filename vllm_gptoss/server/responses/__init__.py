"""The Responses API for gpt-oss. A request goes through five rooms, and its events come back the same way.

1. `transport`: bytes of HTTP or a WebSocket to JSON and a caller; events to frames
2. `request`: JSON to a checked `CreateRequest`, or an error that names the field
3. `prompt`: a request and its history to Harmony, its tools, and the grammar that the engine must keep
4. `run`: all that to a `Job`; the engine's tokens to items and events; tool calls and their answers
5. `state`: what outlives a request: responses, conversations, events, sealed reasoning

Imports go one way: `endpoint` -> `transport` -> `run` -> `prompt`, `state` -> `request` -> `options`, `errors`, `ids`.
`endpoint.py` builds all of it for one server.
"""
