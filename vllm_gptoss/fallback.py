"""Where our own failures end: upstream's path serves, and one line says why.

What stock vLLM would serve, a fault of ours must not stop. An explicit wish is different: who asked for a part of the
plugin by name gets an error that says why it cannot run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from vllm_gptoss import _vllm
from vllm_gptoss._vllm import compatibility, worker
from vllm_gptoss.settings import ChoiceError

T = TypeVar("T")

_said: set[tuple[str, str]] = set()


class NotHereError(Exception):
    """A part that has found a reason not to run; the message is the reason."""


def attempt(part: str, wish: str, do: Callable[[], T], meant: tuple[type[Exception], ...] = ()) -> T | None:
    """What `do` returns; None, and one line for each reason, where it raised.

    part: as the start-up line names it; wish: what the user asked for, `auto` for nothing; meant: errors that are to
    end the start.

    Raises:
        ChoiceError: `do` raised, and the user asked for this part by name.
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


def fits(part: str, name: str) -> bool:
    """Whether the installed vLLM equals a tested release in the list `name` of `_vllm/compatibility.py`; logs once
    why it does not. part: as in `attempt`."""

    def check() -> bool:
        if why := compatibility.why_off(name):
            raise NotHereError(why)
        return True

    return bool(attempt(part, "auto", check))


def log(part: str, error: Exception) -> None:
    """Logs, once for each reason, that upstream's path is used from here on."""
    _say(part, _reason(error))


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, ChoiceError | NotHereError) else f"{type(error).__name__}: {error}"


def together(part: str, ready: bool) -> bool:
    """Whether every tensor-parallel rank is ready. Ranks on different paths would wait for one another's sums."""
    everybody: bool = worker.all_ranks(ready)
    if ready and not everybody:
        _say(part, "another rank stepped aside")
    return everybody


def _say(part: str, reason: str) -> None:
    if (part, reason) not in _said:
        _said.add((part, reason))
        _vllm.init_logger("vllm.gptoss").warning("%s: upstream from here on (%s)", part, reason)
