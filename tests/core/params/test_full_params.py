"""Memory that full values pass through is given up when it has to be, not when everyone has let go of it."""

from __future__ import annotations

import pytest
import torch

from tests.kit.models.under_test import TORCH

pytestmark = pytest.mark.skipif(TORCH, reason="the engine's own parts")
if not TORCH:
    from shardckpt.core.comm.streams import FULL_BYTES
    from shardckpt.core.params.full_params import Staging


def test_staging_gives_up_its_memory_before_it_takes_more():
    """A thread of gloo holds the tensors of a collective for a moment after it has been waited for."""
    staging, before = Staging(), FULL_BYTES.held
    held_by_the_backend = staging.place(8, torch.float32, torch.device("cpu"))
    larger = staging.place(16, torch.float32, torch.device("cpu"))
    assert held_by_the_backend.untyped_storage().nbytes() == 0
    assert (larger.untyped_storage().nbytes(), FULL_BYTES.held - before) == (64, 64)


def test_staging_is_kept_where_it_is_large_enough():
    staging = Staging()
    first = staging.place(16, torch.float32, torch.device("cpu"))
    second = staging.place(4, torch.float64, torch.device("cpu"))
    assert second.data_ptr() == first.data_ptr()
