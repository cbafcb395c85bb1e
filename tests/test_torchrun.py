"""What torchrun says of this machine's ranks."""

from __future__ import annotations

import pytest

from shardckpt.torchrun import local_world_size


@pytest.mark.parametrize(
    ("setting", "found"), [(None, None), ("", None), ("0", None), ("-2", None), ("two", None), ("²", None), ("8", 8)]
)
def test_only_a_positive_number_counts_as_ranks(
    monkeypatch: pytest.MonkeyPatch, setting: str | None, found: int | None
) -> None:
    if setting is None:
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    else:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", setting)
    assert local_world_size() == found
