"""Tools of a server: python in a sandbox, a browser, MCP servers; a package that could be its own.

In: calls, by `protocol`, all that the rest of the project knows of this one. Out: results. `server` opens what
`config` names, `gate` bounds every call, `serve` and `service` share one place of tools among many servers.
"""
