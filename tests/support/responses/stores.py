"""A response store without a server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from vllm_gptoss.server.responses.options import ResponsesOptions
from vllm_gptoss.server.responses.state.store import Store


@asynccontextmanager
async def opened(place: Path | str, **options: Any) -> AsyncIterator[Store]:
    """`place`: a file, or a database's URL."""
    store = Store(ResponsesOptions(store=str(place), **options))
    await store.open()
    try:
        yield store
    finally:
        await store.aclose()
