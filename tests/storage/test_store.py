"""A wrapped store is the one beneath in everything, but for what a subclass changes."""

import pytest

from shardckpt.storage.local import LocalStore
from shardckpt.storage.store import WrappedStore, read_bytes
from shardckpt.testing.store_suite import StoreSuite, put


class TestOnDisk(StoreSuite):
    @pytest.fixture
    def store(self, tmp_path):
        return WrappedStore(LocalStore(str(tmp_path / "root")))


def test_it_is_where_the_one_beneath_is_and_can_what_that_can(tmp_path):
    beneath = LocalStore(str(tmp_path))
    assert (WrappedStore(beneath).url, WrappedStore(beneath).capabilities) == (beneath.url, beneath.capabilities)


def test_a_subclass_says_what_is_different(tmp_path):
    class Empty(WrappedStore):
        def list(self, folder=""):
            return []

    store = Empty(LocalStore(str(tmp_path)))
    put(store, "a.bin", b"there")
    assert store.list() == []
    assert read_bytes(store, "a.bin", 0, 5) == b"there"
