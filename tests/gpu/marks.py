"""The marks of every test of this folder, and the parameters of those that were chosen."""

import pytest
import torch

SM90 = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs an sm90 GPU (H100, H200); docs/testing.md lists where it passed last",
    ),
]


def chosen(request: pytest.FixtureRequest, parameter: str) -> set[str]:
    """The values of a parameter in the chosen tests of the file that requests a fixture."""
    here = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    return {item.callspec.params[parameter] for item in here}
