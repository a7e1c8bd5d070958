"""What a schema says that no grammar here can hold."""

from __future__ import annotations


class NotEnforceableError(ValueError):
    """`keyword` of a schema has no grammar; `why` says what about it, in words for the client."""

    def __init__(self, keyword: str, why: str) -> None:
        super().__init__(f"'{keyword}' {why}")
        self.keyword = keyword
        self.why = why


class NotNowError(NotEnforceableError):
    """Not known: the workers that write grammars are busy, or one was killed. The same request may succeed later."""

    retry_after = 5  # seconds

    @property
    def headers(self) -> dict[str, str]:
        """Of the answer, whose status is 503."""
        return {"Retry-After": str(self.retry_after)}
