"""How the python tool is configured; sizes in MiB because people write them."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field

from vllm_gptoss.tools.sandbox.spec import Limits

DEFAULT_PRELOAD = ("numpy", "pandas", "sympy", "matplotlib")


def _quarter_of_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4 >> 20


class PythonOptions(BaseModel, extra="forbid", frozen=True):
    """The `python` tool's settings. Unknown names are errors."""

    python: Path = Field(default=Path(sys.executable), description="Interpreter of the kernels; needs ipykernel.")
    launcher: Literal["auto", "namespaces", "bubblewrap", "portable"] = Field(
        default="auto",
        description="auto: the first of namespaces, bubblewrap and portable that works here.",
    )
    cgroup: Path | None = Field(
        default=None, description="A delegated cgroup v2 directory, for limits that the kernel itself keeps."
    )
    preload: tuple[str, ...] = Field(default=DEFAULT_PRELOAD, description="Imported once and shared, where installed.")
    packages: tuple[str, ...] = Field(default=(), description="Must be importable, else the tool is unavailable.")
    read_only_paths: tuple[Path, ...] = Field(default=(), description="More of the host that programs may read.")
    hidden_paths: tuple[Path, ...] = Field(default=(), description="Emptied inside, e.g. weights below the prefix.")
    allow_network: bool = Field(
        default=False,
        description="Shares the host's network, its loopback, private addresses and metadata services included.",
    )
    dangerously_run_python_on_host: bool = Field(
        default=False, description="No isolation at all: the model's code runs as the server's user."
    )
    run_as_uid: int = Field(default=65534, ge=1, description="User id of a root server's kernels.")
    run_as_gid: int = Field(default=65534, ge=1, description="Group id of a root server's kernels.")

    timeout_s: float = Field(default=120.0, gt=0, description="Wall clock per call.")
    interrupt_grace_s: float = Field(default=3.0, gt=0, description="From interrupt to kill.")
    memory_mib: int = Field(default=2048, ge=64, description="All processes of a conversation and its files.")
    total_memory_mib: int = Field(
        default_factory=_quarter_of_memory,
        ge=64,
        description="Memory of all idle conversations together; the longest unused are closed first.",
    )
    scratch_mib: int = Field(default=256, ge=1, description="All files a conversation writes.")
    inodes: int = Field(default=16384, ge=256)
    processes: int = Field(default=64, ge=16, description="Processes and threads; the kernel itself needs about 12.")
    open_files: int = Field(default=512, ge=64)
    cpus: int = Field(default=2, ge=1)
    max_output_chars: int = Field(default=64_000, ge=256, description="Output of one call that the model reads.")
    max_images: int = Field(default=16, ge=0)
    max_message_mib: int = Field(default=16, ge=1, description="One display output, e.g. an image in base64.")
    max_file_mib: int = Field(default=64, ge=1, description="A larger file cannot be downloaded.")
    max_files_per_call: int = Field(default=32, ge=0)
    file_store_mib: int = Field(default=2048, ge=1)
    file_keep_s: float = Field(default=1200.0, gt=0)
    files: str = Field(
        default="",
        description="Folder or fsspec URL (s3://…): files outlive the server, and other servers find them.",
    )

    caller_containers: int = Field(default=0, ge=0, description="Alive at once for one caller; 0: no limit.")
    caller_runs_per_minute: int = Field(default=0, ge=0, description="Calls of one caller; 0: no limit.")
    caller_files_mib: int = Field(default=0, ge=0, description="Stored files of one caller; 0: no limit.")

    max_conversations: int = Field(default=50, ge=1, description="Kernels at once; idle ones make room.")
    warm: int = Field(default=2, ge=0, description="Kernels started in advance.")
    idle_s: float = Field(default=1200.0, gt=0, description="A conversation unused for so long loses its state.")
    queue_s: float = Field(default=30.0, ge=0, description="Wait for a free kernel when all are busy.")
    start_timeout_s: float = Field(default=60.0, gt=0)

    def limits(self, max_memory: int = 1 << 62) -> Limits:
        return Limits(
            memory=min(self.memory_mib << 20, max_memory),
            scratch=self.scratch_mib << 20,
            inodes=self.inodes,
            processes=self.processes,
            open_files=self.open_files,
            cpus=self.cpus,
            shared_memory=self.cgroup is not None,
        )
