"""One response at a time for a conversation, on all servers of the store."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from vllm_gptoss.server.responses.errors import ApiError, not_found
from vllm_gptoss.server.responses.state.quotas import StorageUsage
from vllm_gptoss.server.responses.state.store import Store
from vllm_gptoss.server.responses.state.stored import StoreError

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class ConversationHold:
    """Locks a conversation for one response, on all servers, as OpenAI does: two would not see each other's items.

    `take()`, `renew()` while the response runs, `release()`. The lock of a server that died expires after the store's
    heartbeat.
    """

    store: Store
    tenant: str
    conversation: str
    response: str
    _renewing: asyncio.Task[None] | None = None

    async def take(self) -> None:
        """Raises `ApiError` when the conversation does not exist, or another response works on it; `QuotaError`."""
        await self.store.quotas.make_room(self.tenant, StorageUsage(items=1))
        if await self._hold():
            return
        if await self.store.conversations.get(self.tenant, self.conversation) is None:
            raise not_found("Conversation", self.conversation, "conversation")
        message = "Another process is currently operating on this conversation. Please retry in a few seconds."
        raise ApiError(message, param="conversation", code="conversation_locked")

    def renew(self) -> None:
        """Renews the hold in the background until `release()`."""
        self._renewing = asyncio.create_task(self._keep())

    async def _hold(self) -> bool:
        seconds = self.store.config.heartbeat
        return await self.store.conversations.hold(self.tenant, self.conversation, self.response, seconds)

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(self.store.config.heartbeat / 3)
            try:
                await self._hold()
            except StoreError as error:
                logger.warning("The lock of conversation %s was not renewed: %s", self.conversation, error)

    async def release(self) -> None:
        """Unlocks the conversation. Never raises: a lock that cannot be released expires."""
        if self._renewing:
            self._renewing.cancel()
        try:
            await self.store.conversations.release(self.conversation, self.response)
        except StoreError as error:
            logger.warning("Conversation %s is locked until its hold expires: %s", self.conversation, error)
