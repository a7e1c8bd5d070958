"""Search backends by the name that configuration uses. Adding one: a class in `web.py` and a name here."""

from __future__ import annotations

from vllm_gptoss.tools.browser.backends.base import ApiBackend, Backend, BackendError, Hit, Query
from vllm_gptoss.tools.browser.backends.offline import Offline
from vllm_gptoss.tools.browser.backends.web import Brave, Exa, Searxng, Tavily, YouCom

API_BACKENDS: dict[str, type[ApiBackend]] = {cls.name: cls for cls in (Searxng, Brave, Tavily, Exa, YouCom)}

__all__ = ["API_BACKENDS", "ApiBackend", "Backend", "BackendError", "Hit", "Offline", "Query"]
