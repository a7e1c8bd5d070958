"""Prometheus metrics of the Responses API, shown by the web page and the Grafana dashboard."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

RESPONSES = Counter("gptoss_responses", "Responses that ended, by status", ["status"])
BACKGROUND = Gauge(
    "gptoss_background_responses", "Background responses, by state", ["state"], multiprocess_mode="livesum"
)
CONVERSATIONS = Counter("gptoss_conversations", "Conversations that were created")
STORE_SECONDS = Histogram("gptoss_store_seconds", "How long transactions of the store took, with their wait")
STORE_ERRORS = Counter("gptoss_store_errors", "Transactions of the store that failed")
