"""Lists in the style of the OpenAI API: `order`, `limit`, `after`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_gptoss.server.responses.errors import ApiError, not_found


@dataclass(frozen=True, slots=True)
class ListPage:
    """The query of a list: up to `limit` entries that follow the one with the id `after`."""

    ascending: bool
    limit: int
    after: str | None


def asked(query: Mapping[str, str]) -> ListPage:
    """The page of a query. Newest first unless `order=asc`. Raises `ApiError`."""
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise ApiError("'order' is 'asc' or 'desc'.", param="order", code="invalid_value")
    try:
        limit = int(query.get("limit", 20))
    except ValueError:
        limit = 0
    if not 1 <= limit <= 100:
        raise ApiError("'limit' is a number from 1 to 100.", param="limit", code="invalid_value")
    return ListPage(order == "asc", limit, query.get("after"))


def page_of(items: Sequence[dict[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """One page of `items`, which are in the order they happened."""
    page = asked(query)
    ordered = list(items) if page.ascending else list(reversed(items))
    if page.after is not None:
        at = next((i for i, item in enumerate(ordered) if item["id"] == page.after), None)
        if at is None:
            raise not_found("Item", page.after, "after")
        ordered = ordered[at + 1 :]
    return listed(ordered, page)


def listed(found: Sequence[dict[str, Any]], page: ListPage) -> dict[str, Any]:
    """The answer with the first `page.limit` of `found`, which has one more entry if there is a next page."""
    data = found[: page.limit]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else "",
        "last_id": data[-1]["id"] if data else "",
        "has_more": len(found) > page.limit,
    }
