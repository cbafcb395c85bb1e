"""The store in a holder's memory: the suite, over a real process."""

import os
import shutil
import tempfile

import pytest

from shardckpt.testing.store_suite import put
from shardckpt.tiers.holder.holder_store import HolderStore
from shardckpt.tiers.holder.holders import start_holder, stop_holders
from tests.kit.stores.remote_suite import RemoteSuite

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


class TestHolderStore(RemoteSuite):
    @pytest.fixture
    def store(self, sockets):
        store = HolderStore(f"shardckpt-memory://{RUN}")
        for entry in store.list():
            (store.delete_folder if entry.is_folder else store.delete)(entry.name)
        return store

    def test_more_names_than_one_answer_has_are_all_listed(self, store):
        names = [f"step-1/{'x' * 300}{number:04d}" for number in range(300)]
        for name in names:
            put(store, name, b"1")
        assert [entry.name for entry in store.list("step-1")] == names
