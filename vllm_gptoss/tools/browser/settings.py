"""The browser's configuration. Does not import the packages that read pages, so that it is checked without them."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field, SecretStr, field_validator

from vllm_gptoss.tools.browser.guard import host_entry
from vllm_gptoss.tools.version import NAME, VERSION

AGENT = f"{NAME}/{VERSION}"
SEARCH_APIS = ("searxng", "brave", "tavily", "exa", "youcom")
"""Names of the classes in `backends/web.py`."""


class BrowserConfig(BaseModel, extra="forbid"):
    """The `browser` section of tools.yaml. Everything has a default; nothing needs a key."""

    backend: str = "auto"
    documents: Path | None = Field(
        default=None, description="folder of html, md, txt and pdf files that the model may search"
    )
    documents_url: str = Field(
        default="file:///", description="what documents that declare no URL get before their path"
    )
    url: str = Field(default="", description="address of the search backend, for SearXNG or a gateway")
    api_key: SecretStr = SecretStr("")
    open_with: Literal["fetch", "backend", "documents"] = "fetch"
    respect_robots: bool = True
    user_agent: str = AGENT
    allow_hosts: list[str] = Field(default=[], description="non-public `host` or `host:port` that may be opened")
    max_bytes: int = Field(default=5_000_000, gt=0)
    timeout_s: float = Field(default=20.0, gt=0)
    idle_s: float = Field(default=3600.0, gt=0, description="when a conversation's pages are forgotten")
    max_conversations: int = Field(default=1000, gt=0)
    cache_mib: int = Field(default=1024, gt=0, description="what the pages of all conversations may take together")

    @field_validator("backend")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in (known := ("auto", "offline", "fetch", *SEARCH_APIS)):
            raise ValueError(f"there is no backend {name!r}, only {', '.join(known)}")
        return name

    @field_validator("allow_hosts")
    @classmethod
    def _hosts(cls, entries: list[str]) -> list[str]:
        return [host_entry(entry) for entry in entries]
