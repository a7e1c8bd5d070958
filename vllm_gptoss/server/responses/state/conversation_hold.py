"""One response at a time for a conversation, on all servers of the store."""

from __future__ import annotations

import asyncio
import logging

from vllm_gptoss.server.responses.errors import ApiError, not_found
from vllm_gptoss.server.responses.state.quotas import StorageUsage
from vllm_gptoss.server.responses.state.store import Store
from vllm_gptoss.server.responses.state.stored import StoreError

logger = logging.getLogger(__name__)


class ConversationHold:
    """Locks a conversation for one response, on all servers, as OpenAI does: two would not see each other's items.

    `take()`, `renew()` while the response runs, `release()`. The lock of a server that died expires after the store's
    heartbeat.
    """

    def __init__(self, store: Store, tenant: str, conversation: str, response: str) -> None:
        self._rows = store.conversations
        self._quotas = store.quotas
        self._seconds = store.config.heartbeat
        self._tenant = tenant
        self._conversation = conversation
        self._response = response
        self._renewing: asyncio.Task[None] | None = None

    async def take(self) -> None:
        """Raises `ApiError` when the conversation does not exist, or another response works on it; `QuotaError`."""
        await self._quotas.make_room(self._tenant, StorageUsage(items=1))
        if await self._rows.hold(self._tenant, self._conversation, self._response, self._seconds):
            return
        if await self._rows.get(self._tenant, self._conversation) is None:
            raise not_found("Conversation", self._conversation, "conversation")
        message = "Another process is currently operating on this conversation. Please retry in a few seconds."
        raise ApiError(message, param="conversation", code="conversation_locked")

    def renew(self) -> None:
        """Renews the hold in the background until `release()`."""
        self._renewing = asyncio.create_task(self._keep())

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(self._seconds / 3)
            try:
                await self._rows.hold(self._tenant, self._conversation, self._response, self._seconds)
            except StoreError as error:
                logger.warning("The lock of conversation %s was not renewed: %s", self._conversation, error)

    async def release(self) -> None:
        """Unlocks the conversation. Never raises: a lock that cannot be released expires."""
        if self._renewing:
            self._renewing.cancel()
        try:
            await self._rows.release(self._conversation, self._response)
        except StoreError as error:
            logger.warning("Conversation %s is locked for %g s more: %s", self._conversation, self._seconds, error)
