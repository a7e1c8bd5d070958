"""Confined worker processes that parse untrusted bytes.

Data from a page, a program, an MCP server or a client is never parsed, decoded or matched on the event loop or in a
thread of the server. A worker parses it: without network, files and environment, with a few dozen system calls and
limits on memory and time. A worker reads one payload and ends, so it never holds the data of two callers, and a hostile
payload can end only its own process. The answer is bounded and decoded into the job's declared type.

The order things happen in: `pool` (server, asyncio; bounded queues) → `nursery` (one fork server for the process) →
`worker` (imports the modules of `jobs`, gives everything away, forks) → a job. The walls are `tools/sandbox`'s.
"""

from vllm_gptoss.tools.confined.jobs import Refused, job
from vllm_gptoss.tools.confined.pool import BusyError, ConfinedError, FaultError, Limit, Pool, Sizes, pool, set_sizes

__all__ = ["BusyError", "ConfinedError", "FaultError", "Limit", "Pool", "Refused", "Sizes", "job", "pool", "set_sizes"]
