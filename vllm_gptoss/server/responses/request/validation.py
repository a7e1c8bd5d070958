"""Converts pydantic's errors to the API's, and refuses unknown fields."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from vllm_gptoss.server.http.bodies import fail_fast
from vllm_gptoss.server.responses.errors import ApiError, unknown_parameter

M = TypeVar("M", bound=BaseModel)


def validate(model: type[M], value: Any, where: str) -> M:
    """`value` as `model`, strictly: no coercion, no unknown field. `where` is its path in the request."""
    try:
        checked: M = fail_fast(model).validate_python(value, strict=True)
    except ValidationError as error:
        raise from_validation(error, where) from None
    check_model(checked, where)
    return checked


def from_validation(error: ValidationError, where: str = "") -> ApiError:
    """The error at the deepest location: of a union, that of the type that the client meant."""
    complaint = max(error.errors(include_url=False), key=lambda e: (len(e["loc"]), e["type"] == "missing"))
    param = join(where, [part for part in complaint["loc"] if isinstance(part, int) or _is_field(part)])
    code = "missing_required_parameter" if complaint["type"] == "missing" else "invalid_type"
    return ApiError(f"Invalid '{param}': {complaint['msg']}.", param=param, code=code)


def _is_field(part: str) -> bool:
    """pydantic puts the names of union members into locations: `ResponseInputText`, `list[str]`, `str`."""
    return part.islower() and part.replace("_", "").isalnum() and part not in ("str", "int", "float", "bool")


def join(where: str, parts: Sequence[str | int]) -> str:
    """`input`, [0, "content"] -> `input[0].content`."""
    for part in parts:
        where = f"{where}[{part}]" if isinstance(part, int) else f"{where}.{part}" if where else part
    return where


def check_model(model: BaseModel, where: str = "") -> None:
    """Refuses fields that the API does not have, at any depth. openai-python's models keep them silently."""
    if extra := model.model_extra:
        raise unknown_parameter(join(where, [next(iter(extra))]))
    for name in model.model_fields_set:
        _check_value(getattr(model, name), join(where, [name]))


def _check_value(value: Any, where: str) -> None:
    if isinstance(value, BaseModel):
        check_model(value, where)
    elif isinstance(value, list):
        for index, entry in enumerate(value):
            _check_value(entry, f"{where}[{index}]")
