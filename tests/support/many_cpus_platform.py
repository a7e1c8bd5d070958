"""The platform of `many_cpus`. It is imported with vLLM's platforms, before anything else of vLLM can be."""

from __future__ import annotations

from vllm.platforms.cpu import CpuPlatform


class Platform(CpuPlatform):
    @classmethod
    def get_device_communicator_cls(cls) -> str:
        return "tests.support.many_cpus_communicator.Communicator"
