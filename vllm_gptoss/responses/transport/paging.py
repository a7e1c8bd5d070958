"""Lists in the style of the OpenAI API: `order`, `limit`, `after`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_gptoss.responses.errors import ApiError, not_found


def page_of(items: Sequence[dict[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """One page of `items` (which are in the order they happened). Newest first unless `order=asc`."""
    order, after = query.get("order", "desc"), query.get("after")
    if order not in ("asc", "desc"):
        raise ApiError("'order' is 'asc' or 'desc'.", param="order", code="invalid_value")
    try:
        limit = int(query.get("limit", 20))
    except ValueError:
        limit = 0
    if not 1 <= limit <= 100:
        raise ApiError("'limit' is a number from 1 to 100.", param="limit", code="invalid_value")
    ordered = list(items) if order == "asc" else list(reversed(items))
    if after is not None:
        at = next((i for i, item in enumerate(ordered) if item["id"] == after), None)
        if at is None:
            raise not_found("Item", after, "after")
        ordered = ordered[at + 1 :]
    page = ordered[:limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else "",
        "last_id": page[-1]["id"] if page else "",
        "has_more": len(ordered) > limit,
    }
