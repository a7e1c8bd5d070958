"""Where a tools service is, as its clients are configured."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import BaseModel, Field, field_validator

from vllm_gptoss.tools.mcp.settings import McpServerConfig

KEY = "GPTOSS_TOOLS_KEY"


class ServiceConfig(BaseModel, extra="forbid"):
    """`service` in tools.yaml: the nodes, in any order, but written alike for every server that uses them."""

    nodes: list[str] = Field(min_length=1, description="`http(s)://host:port` of each `vllm-gptoss tools serve`")
    authorization_env: str = Field(default="", description=f"variable with the key; {KEY} where that is set")
    ca_file: Path | None = Field(default=None, description="certificates to trust besides the usual ones, PEM")
    connect_timeout_s: float = Field(default=5.0, gt=0)
    timeout_s: float = Field(default=300.0, gt=0, description="one call, with its wait for a kernel")

    @field_validator("nodes")
    @classmethod
    def _addresses(cls, nodes: list[str]) -> list[str]:
        for node in nodes:
            parts = urlsplit(node)
            if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.username:
                raise ValueError(f"{node!r} is not the address of a node; write http://host:port")
        clean = [node.rstrip("/") for node in nodes]
        if len(set(clean)) != len(clean):
            raise ValueError("a node is named twice")
        return clean

    def entry(self, node: str, environ: Mapping[str, str]) -> McpServerConfig:
        return McpServerConfig(
            url=f"{node}/python/mcp",
            kind="python",
            transport="streamable_http",
            authorization_env=self.authorization_env or (KEY if environ.get(KEY) else ""),
            ca_file=self.ca_file,
            connections="per_conversation",
            connect_timeout_s=self.connect_timeout_s,
            timeout_s=self.timeout_s,
            max_output_chars=1 << 20,  # the node's operator bounds it
        )
