"""What every test of this folder is marked with."""

import pytest
import torch

SM90 = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs an sm90 GPU (H100, H200); docs/testing.md lists where it passed last",
    ),
]
