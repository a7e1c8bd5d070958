"""Falls back to vLLM's own implementation where a part of the plugin fails, with one log line.

A fault of the plugin must not stop a request that stock vLLM would serve. A part that the user requested by name is
different: its failure is an error with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from vllm_gptoss import _vllm
from vllm_gptoss._vllm import compatibility, worker
from vllm_gptoss.settings import ChoiceError

T = TypeVar("T")

_said: set[tuple[str, str]] = set()


class UnavailableError(Exception):
    """A part cannot run here; the message is the reason."""


def attempt(part: str, wish: str, do: Callable[[], T], meant: tuple[type[Exception], ...] = ()) -> T | None:
    """Returns the result of `do`. If `do` raises, returns None and logs each reason once.

    part: its name in the start-up line; `wish`: the value of the user's setting, or `auto`; meant: errors that are
    raised unchanged.

    Raises:
        ChoiceError: `do` raised, and the user requested this part by name.
    """
    try:
        return do()
    except meant:
        raise
    except Exception as error:
        if wish not in ("auto", "upstream"):
            if isinstance(error, ChoiceError):
                raise
            raise ChoiceError(f"{part}={wish} cannot run here: {_reason(error)}; use {part}=auto") from error
        log(part, error)
        return None


def or_end(part: str, ranks: int, do: Callable[[], T]) -> T:
    """The result of `do`. If `do` raises on one of several ranks, ends the process: vLLM only logs an exception of a
    rank other than the first, and the peers would wait for this step's values, or take those of the next step."""
    try:
        return do()
    except Exception as error:
        if ranks == 1:
            raise
        _vllm.init_logger("vllm.gptoss").exception("%s: this rank ends, because its peers wait for it", part)
        raise SystemExit(f"{part}: {_reason(error)}") from error


def fits(part: str, name: str) -> bool:
    """Whether the installed vLLM has the definitions of `name` in `compatibility.PARTS`; logs a difference once.

    part: as in `attempt`.
    """

    def check() -> bool:
        if why := compatibility.why_off(name):
            raise UnavailableError(why)
        return True

    return bool(attempt(part, "auto", check))


def log(part: str, error: Exception) -> None:
    """Logs once for each reason that vLLM's own implementation is used from here on."""
    _say(part, _reason(error))


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, ChoiceError | UnavailableError) else f"{type(error).__name__}: {error}"


def together(part: str, ready: bool) -> bool:
    """Whether every tensor-parallel rank is ready. Ranks on different paths would deadlock in an all-reduce."""
    all_ready: bool = worker.all_ranks(ready)
    if ready and not all_ready:
        _say(part, "another rank stepped aside")
    return all_ready


def _say(part: str, reason: str) -> None:
    if (part, reason) not in _said:
        _said.add((part, reason))
        _vllm.init_logger("vllm.gptoss").warning("%s: upstream from here on (%s)", part, reason)
