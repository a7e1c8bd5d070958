"""A Ray cluster of two nodes on this machine, in a separate process: the second has other variables than the first.

Prints the cluster's address. `kill` on stdin kills the second node and prints a line; the end of stdin stops the
cluster.
"""

from __future__ import annotations

import sys
from typing import Any

from ray.cluster_utils import Cluster

STORE = {"num_cpus": 1, "object_store_memory": 80_000_000}


def main() -> None:
    cluster = Cluster(initialize_head=True, head_node_args={**STORE, "include_dashboard": False})
    other: Any = cluster.add_node(**STORE, env_vars={"GPTOSS_EXPERTS": "upstream"})
    print(cluster.address, flush=True)
    for line in sys.stdin:
        if line.strip() == "kill":
            cluster.remove_node(other, allow_graceful=False)
            print("killed", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()
