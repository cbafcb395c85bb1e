"""What the tests of a GPU share, without what only other tests need: `tests/gpu/run.py` loads no other conftest."""

from __future__ import annotations

import os

import pytest
import torch

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # a check with CUDA is for processes that fork no others


@pytest.fixture(scope="session")
def device() -> str:
    """Type of the device to test: $GPU_TESTS_DEVICE, "cuda" by default."""
    name = os.environ.get("GPU_TESTS_DEVICE", "cuda")
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU: nothing is tested on CUDA; its scenarios run on the simulated device")
    return name
