"""Steps that are copied file by file: what is missing in them is named."""

from __future__ import annotations

import pytest

from shardckpt.errors import IncompleteError
from shardckpt.native.stored_folders import read_stored_step
from shardckpt.storage.resolve_url import open_store
from shardckpt.testing.store_suite import put


def test_a_step_without_a_commit_mark_never_committed_and_its_mark_ends_no_earlier(tmp_path):
    store = open_store(str(tmp_path))
    put(store, "0123-00000-00.safetensors", b"data")
    with pytest.raises(IncompleteError, match="this step was never committed; found 1 files"):
        read_stored_step(store)
