"""Retries for the end of a background response while the database fails: no client waits, and its work is done."""

from __future__ import annotations

import asyncio
import logging
import time

from vllm_gptoss.server.responses.state.store import Store
from vllm_gptoss.server.responses.state.stored import LostError, Stored, StoreError, TakenError, TooLargeError

logger = logging.getLogger(__name__)

RETRY = 1.0
"""Seconds between attempts."""


async def update_at_last(store: Store, stored: Stored, conversation: str | None) -> None:
    """`store.update`, retried while the database fails, for `heartbeat` seconds.

    Raises:
        StoreError: it still fails, or can never succeed.
        LostError: the response was deleted, or ended by another server.
    """
    until = time.monotonic() + store.config.heartbeat
    is_unsure = False  # a connection that broke may have committed
    while True:
        try:
            return await store.update(stored, conversation)
        except LostError:
            there = await store.get(stored.tenant, stored.id) if is_unsure else None
            if there is not None and there.body == stored.body:
                return
            raise
        except (TakenError, TooLargeError):
            raise
        except StoreError as error:
            if time.monotonic() > until:
                raise
            if not is_unsure:
                logger.warning("The end of %s waits to be stored: %s", stored.id, error)
            is_unsure = True
            await asyncio.sleep(RETRY)
