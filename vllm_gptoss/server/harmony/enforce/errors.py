"""Errors of schemas that have no grammar."""

from __future__ import annotations


class NotEnforceableError(ValueError):
    """`keyword` of a schema has no grammar; `why` is the reason for the client."""

    def __init__(self, keyword: str, why: str) -> None:
        super().__init__(f"'{keyword}' {why}")
        self.keyword = keyword
        self.why = why


class NotNowError(NotEnforceableError):
    """The workers that write grammars are busy, or one was killed. The same request may succeed later."""

    retry_after = 5  # seconds

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the 503 answer."""
        return {"Retry-After": str(self.retry_after)}
