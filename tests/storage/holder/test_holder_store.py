"""The store in a holder's memory: the suite, over a real process."""

import os
import shutil
import tempfile

import pytest

from shardckpt.errors import TargetExistsError
from shardckpt.storage.holder.holder_store import HolderStore
from shardckpt.storage.holder.holders import start_holder, stop_holders
from shardckpt.storage.store import read_bytes
from shardckpt.testing.store_suite import StoreSuite, put

RUN = "suite"
MAX_BYTES = 64 << 20


@pytest.fixture(scope="module")
def sockets():
    """A folder of sockets for this module, with one holder."""
    folder = tempfile.mkdtemp()
    before = os.environ.get("XDG_RUNTIME_DIR")
    os.environ["XDG_RUNTIME_DIR"] = folder
    start_holder(RUN, MAX_BYTES, last="COMMIT")
    yield folder
    stop_holders()
    if before is None:
        del os.environ["XDG_RUNTIME_DIR"]
    else:
        os.environ["XDG_RUNTIME_DIR"] = before
    shutil.rmtree(folder)


class TestHolderStore(StoreSuite):
    @pytest.fixture
    def store(self, sockets):
        store = HolderStore(f"shardckpt-memory://{RUN}")
        for entry in store.list():
            (store.delete_folder if entry.is_folder else store.delete)(entry.name)
        return store

    def test_of_two_that_write_what_is_to_be_new_one_succeeds(self, store):
        one, other = store.create("a.bin", is_new=True), store.create("a.bin", is_new=True)
        one.write(b"one")
        other.write(b"other")
        other.close()
        with pytest.raises(TargetExistsError, match=r"a\.bin"):
            one.close()
        assert read_bytes(store, "a.bin", 0, 5) == b"other"
        assert [entry.name for entry in store.list()] == ["a.bin"]

    def test_more_names_than_one_answer_has_are_all_listed(self, store):
        names = [f"step-1/{'x' * 300}{number:04d}" for number in range(300)]
        for name in names:
            put(store, name, b"1")
        assert [entry.name for entry in store.list("step-1")] == names
