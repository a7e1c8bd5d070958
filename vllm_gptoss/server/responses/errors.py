"""Errors of requests, in the format of the OpenAI API."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import KW_ONLY, dataclass
from typing import Any

from vllm_gptoss.server.http.callers import FullError


@dataclass(eq=False, repr=False)
class ApiError(Exception):
    """An error the client can read: HTTP status, and the four fields of OpenAI's error object.

    `retry_after`: seconds for the header of that name, where the same request may succeed later.
    """

    message: str
    _: KW_ONLY
    param: str | None = None
    code: str | None = None
    status: int = 400
    kind: str = "invalid_request_error"
    retry_after: int | None = None

    def body(self) -> dict[str, Any]:
        """The JSON body: `{"error": {message, type, param, code}}`."""
        fields = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": fields}


def unsupported(param: str, why: str) -> ApiError:
    """A field that this server understands but cannot honour."""
    return ApiError(f"'{param}' is not supported: {why}", param=param, code="unsupported_value")


def unknown_parameter(name: str) -> ApiError:
    """A field that the API does not have."""
    return ApiError(f"Unknown parameter: '{name}'.", param=name, code="unknown_parameter")


def checked_object(body: Any, known: Collection[str] | None = None) -> dict[str, Any]:
    """A request body that must be an object, with no field but `known`. Raises `ApiError`."""
    if not isinstance(body, dict):
        raise ApiError("The request body must be a JSON object.")
    if known is not None and (unknown := [name for name in body if name not in known]):
        raise unknown_parameter(unknown[0])
    return body


def not_found(kind: str, identifier: str, param: str | None = None) -> ApiError:
    """Also for resources of another API key, so that their existence stays hidden."""
    message = f"{kind} with id '{identifier}' not found."
    return ApiError(message, param=param, code=f"{kind.lower().replace(' ', '_')}_not_found", status=404)


def id_taken(identifier: str) -> ApiError:
    """For a `request_id` that the client has used before."""
    return ApiError(f"The id '{identifier}' is taken.", param="request_id", code="invalid_value")


def store_failed(error: Any) -> ApiError:
    """A `StoreError` of `state/` for the client: 507 for a quota, else 503."""
    return ApiError(str(error), code=error.code, status=error.status, kind="server_error")


def full(error: FullError, what: str, param: str | None = None) -> ApiError:
    """For a caller that has as many of something as it may have (429), or where all are taken (503)."""
    if error.is_callers:
        return ApiError(f"{error} {what}.", param=param, code="rate_limit_exceeded", status=429)
    return ApiError(f"{error} {what}.", param=param, code="server_busy", status=503, kind="server_error")


def internal(error: Exception) -> ApiError:
    """For an unexpected exception."""
    return ApiError(f"{type(error).__name__}: {error}", code="server_error", status=500, kind="server_error")


class EngineError(Exception):
    """Generation failed through no fault of the request."""


class RetiredKeyError(Exception):
    """Sealed with a key that this server does not have (any more)."""
