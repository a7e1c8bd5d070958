"""Work that is launched as it is the first time, and from a CUDA graph ever after."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch

from vllm_gptoss import fallback

KEPT = 512
"""Most graphs of one kind; the least recently used is evicted. A graph serves one batch size and takes some kB."""


@dataclass(frozen=True, slots=True)
class Launches:
    """Launches of a step with fixed shapes and addresses. The contents of the tensors may change. `launch` takes all
    decisions of the host from the step that it was made for. captures: whether a graph may contain the launches."""

    launch: Callable[[], None]
    captures: bool


class Work:
    """Launches that are alike from step to step.

    The first call launches them one by one, which compiles and loads what a capture needs. After a failed capture,
    which is logged, they are always launched one by one.
    """

    def __init__(self) -> None:
        self.graph: torch.cuda.CUDAGraph | None = None
        self.is_warm, self.failed = False, False

    def run(self, graphs: Graphs, make: Callable[[], Launches]) -> None:
        """Does the work once, on the current stream. make: the launches of this step, for where there is no graph."""
        if self.graph is None:
            step = make()
            if self.is_warm and step.captures and not self.failed:
                self.graph = fallback.attempt("host: graph", "auto", lambda: graphs.capture(step.launch))
                self.failed = self.graph is None
            if self.graph is None:
                step.launch()
                self.is_warm = True
                return
        self.graph.replay()


class Graphs:
    """Works by their key, and the memory that their graphs share. memory: bytes that one of them may need at a time."""

    def __init__(self, device: torch.device, memory: int = 0) -> None:
        self.works: OrderedDict[Hashable, Work] = OrderedDict()
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(device)
        # Batches grow one by one: without a block for the largest, each would leave behind one that is too small for
        # the next. The graph is never run; it keeps the block.
        self.block = self.capture(lambda: torch.zeros(memory, dtype=torch.uint8, device=device)) if memory else None

    def work(self, key: Hashable) -> Work:
        """The work of that key, made at its first use."""
        found = self.works.get(key)
        if found is None:
            found = self.works[key] = Work()
            if len(self.works) > KEPT:
                # A graph must not go while it runs; this happens once in hundreds of batches.
                torch.cuda.current_stream().synchronize()
                self.works.popitem(last=False)
        else:
            self.works.move_to_end(key)
        return found

    def capture(self, launch: Callable[[], object]) -> torch.cuda.CUDAGraph:
        """What `launch` launches, as a graph. It must wait for nothing and allocate only what dies inside it.

        `torch.cuda.graph` would collect garbage and empty the cache first: this happens while requests are served.
        """
        graph = torch.cuda.CUDAGraph()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                launch()
            finally:
                graph.capture_end()
        return graph
