"""The python tool for many servers: who may use it, what both ends exchange in addition to MCP, the servers' side."""
