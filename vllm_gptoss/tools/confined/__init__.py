"""Where untrusted bytes are read: processes that can compute, and nothing else.

What a page, a program, an MCP server or a client sends is never parsed, decoded or matched on the event loop or in a
thread of the server. It goes to a worker here: no network, no files, no environment, a few dozen system calls, limits
on memory and time. A worker reads one payload and ends, so nothing of one caller's is there when another's is read,
and a hostile payload costs its own process. What comes back is bounded and decoded into the job's declared type.

The order things happen in: `pool` (server, asyncio; bounded queues) → `nursery` (one fork server for the process) →
`worker` (imports the modules of `jobs`, gives everything away, forks) → a job. The walls are `tools/sandbox`'s.
"""

from vllm_gptoss.tools.confined.jobs import Refused, job
from vllm_gptoss.tools.confined.pool import BusyError, ConfinedError, FaultError, Limit, Pool, Sizes, pool, set_sizes

__all__ = ["BusyError", "ConfinedError", "FaultError", "Limit", "Pool", "Refused", "Sizes", "job", "pool", "set_sizes"]
