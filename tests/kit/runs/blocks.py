"""Blocks of seeds for comparisons with random settings: `make test` runs the first, `make test-all` 60 seeds."""

from __future__ import annotations

import pytest

BLOCKS = [
    pytest.param(range(4), id="0-3"),
    *(
        pytest.param(range(first, first + 8), id=f"{first}-{first + 7}", marks=pytest.mark.full)
        for first in range(4, 60, 8)
    ),
]
