"""A cache of cubins for tests, by source, options and version of NVRTC."""

from __future__ import annotations

from collections.abc import Sequence
from unittest.mock import patch

from tests.support.places import CACHE
from vllm_gptoss.engine.kernels import nvrtc

_warning = nvrtc.logger.warning


def _strict(message: str, *arguments: object) -> None:
    _warning(message, *arguments)
    assert "slower than it was measured" not in message, message % arguments


def compiled(source: str, arch: str, options: Sequence[str] = ()) -> bytes:
    """The cubin of `nvrtc.compile_cubin`, compiled now or cached in the checkout by an earlier run.

    Raises:
        NvrtcError: the source does not compile. The failure is not cached.
        AssertionError: the compiler serialises the products, which costs a quarter. This result is not cached either.
    """
    kept = patch.dict("os.environ", GPTOSS_CACHE=str(CACHE / "cubins"))
    with kept, patch.object(nvrtc.logger, "warning", _strict):
        return nvrtc.cubin(source, arch, options)


def judged(source: str, arch: str, options: Sequence[str] = ()) -> None:
    """Has the compiler's front end alone look at it: enough for a `static_assert`, in a tenth of the time.

    Raises:
        NvrtcError: it is refused.
    """
    nvrtc.compile_cubin(source, arch, [*options, "-fdevice-syntax-only"])
