"""`vllm-gptoss doctor`: is the plugin active, does this machine fit, and which settings do nothing."""

from vllm_gptoss.cli.doctor.findings import Finding, Status, examine

__all__ = ["Finding", "Status", "examine"]
