"""The suite of stores whose files appear at once when they are closed, with nothing beside them before."""

import pytest

from shardckpt.errors import TargetExistsError
from shardckpt.storage.store import read_bytes
from shardckpt.testing.store_suite import StoreSuite, put


class RemoteSuite(StoreSuite):
    def test_of_two_that_write_what_is_to_be_new_one_succeeds(self, store):
        one, other = store.create("a.bin", is_new=True), store.create("a.bin", is_new=True)
        one.write(b"one")
        other.write(b"other")
        other.close()
        with pytest.raises(TargetExistsError, match=r"a\.bin"):
            one.close()
        assert read_bytes(store, "a.bin", 0, 5) == b"other"
        assert [entry.name for entry in store.list()] == ["a.bin"]

    def test_what_is_new_appears_and_is_replaced_later(self, store):
        with store.create("sub/a.bin", is_new=True) as writer:
            writer.write(b"new")
        put(store, "sub/a.bin", b"newer")
        assert read_bytes(store, "sub/a.bin", 0, 5) == b"newer"
