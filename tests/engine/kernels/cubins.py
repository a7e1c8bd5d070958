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
    """What `nvrtc.compile_cubin` makes of it, now or in an earlier run: through our own cache, in the checkout's.

    Raises:
        NvrtcError: it does not compile. This is not kept.
        AssertionError: the compiler serialises its products, which costs a quarter. Nor is this.
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
