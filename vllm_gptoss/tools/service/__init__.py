"""The python tool for many servers: who may use it, what both ends say to each other beside MCP, the servers' side."""
