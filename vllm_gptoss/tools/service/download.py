"""Files of a tools service's containers. Every node is queried: the one that made a file may be gone, and nodes with
one place for files have all of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence

import httpx
from pydantic import BaseModel, Field, ValidationError

from vllm_gptoss.tools.mcp.connection import origin
from vllm_gptoss.tools.mcp.settings import bearer
from vllm_gptoss.tools.mcp.transport import trust
from vllm_gptoss.tools.protocol import StoredFile
from vllm_gptoss.tools.service.settings import ServiceConfig
from vllm_gptoss.tools.service.wire import Listed

logger = logging.getLogger(__name__)

_MAX_LISTING = 4 << 20
_MAX_FILE = 1 << 30
_READ_S = 30.0


class _Listing(BaseModel):
    files: list[Listed] = Field(max_length=10_000)


class _RefusedError(Exception):
    """A node did not return the requested file."""


class Downloads:
    def __init__(self, config: ServiceConfig, environ: Mapping[str, str]) -> None:
        self._config = config
        self._environ = environ
        self._http: httpx.AsyncClient | None = None

    async def aclose(self) -> None:
        if self._http is not None:
            await self._http.aclose()

    async def list_files(self, container_id: str) -> Sequence[StoredFile]:
        """The container's files on the first node that has any."""
        return (await self._found(container_id))[1]

    async def read_file(self, container_id: str, file_id: str) -> StoredFile | None:
        """The file with its bytes; None where no node that answers has it."""
        node, files = await self._found(container_id)
        info = next((file for file in files if file.file_id == file_id), None)
        if info is None:
            return None
        try:
            data = await self._get(f"{node}/containers/{container_id}/files/{file_id}/content", info.size)
        except _RefusedError as error:
            logger.warning("tools service: file %s is not there any more: %s", file_id, error)
            return None
        return StoredFile(container_id, file_id, info.filename, info.media_type, info.size, info.created_at, data)

    async def _found(self, container_id: str) -> tuple[str, list[StoredFile]]:
        if not container_id.isascii() or not container_id.replace("_", "").isalnum():
            return "", []
        nodes = self._config.nodes
        listings = await asyncio.gather(*(self._listed(node, container_id) for node in nodes))
        return next((found for found in zip(nodes, listings, strict=True) if found[1]), ("", []))

    async def _listed(self, node: str, container_id: str) -> list[StoredFile]:
        try:
            raw = await self._get(f"{node}/containers/{container_id}/files", _MAX_LISTING)
            rows = _Listing.model_validate_json(raw).files
        except (_RefusedError, ValidationError) as error:
            logger.warning("tools service: %s does not list its files: %s", origin(node), error)
            return []
        return [StoredFile(container_id, r.file_id, r.filename, r.media_type, r.bytes, r.created_at) for r in rows]

    async def _get(self, url: str, max_bytes: int) -> bytes:
        """Raises _RefusedError."""
        body = bytearray()
        try:
            async with self._client().stream("GET", url) as answer:
                if answer.status_code != 200:
                    raise _RefusedError(f"HTTP {answer.status_code}")
                async for chunk in answer.aiter_bytes(1 << 16):
                    body += chunk
                    if len(body) > min(max_bytes, _MAX_FILE):
                        raise _RefusedError(f"more than {max_bytes} bytes")
        except httpx.HTTPError as error:
            raise _RefusedError(type(error).__name__) from error
        return bytes(body)

    def _client(self) -> httpx.AsyncClient:
        if self._http is None:
            entry = self._config.entry(self._config.nodes[0], self._environ)
            headers = {**bearer(entry, self._environ), "Accept-Encoding": "identity"}
            timeout = httpx.Timeout(_READ_S, connect=self._config.connect_timeout_s)
            self._http = httpx.AsyncClient(headers=headers, timeout=timeout, verify=trust(self._config.ca_file))
        return self._http
