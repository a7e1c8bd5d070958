"""Tools of MCP servers: `settings` has the address, `transport` dials it, `connection` keeps it, `provider` offers it.

Model Context Protocol, revisions 2024-11-05 to 2026-07-28, spoken by the `mcp` package.
"""
