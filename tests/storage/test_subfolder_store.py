"""A folder of a store is a store: the suite on a disk and in memory, and nothing outside of the folder."""

import fsspec
import pytest

from shardckpt.errors import UnsafeError
from shardckpt.storage.fsspec_store import FsspecStore
from shardckpt.storage.local import LocalStore
from shardckpt.storage.store import Listed, SubfolderStore
from shardckpt.testing.store_suite import StoreSuite, put


class TestOnDisk(StoreSuite):
    @pytest.fixture
    def store(self, tmp_path):
        return SubfolderStore(LocalStore(str(tmp_path / "root")), "step-1")


class TestInMemory(StoreSuite):
    @pytest.fixture
    def store(self):
        fs = fsspec.filesystem("memory")
        fs.store.clear()
        fs.pseudo_dirs[:] = [""]
        return SubfolderStore(FsspecStore("memory://some/root"), "step-1")


def test_it_sees_its_folder_alone_under_the_names_below_it(tmp_path):
    outer = LocalStore(str(tmp_path))
    put(outer, "a.bin", b"outer")
    inner = SubfolderStore(outer, "sub/deep")
    put(inner, "b.bin", b"in")
    assert inner.list() == [Listed("b.bin", 2, False)]
    assert outer.list("sub/deep") == [Listed("sub/deep/b.bin", 2, False)]
    assert inner.url == f"{tmp_path}/sub/deep"


@pytest.mark.parametrize("folder", ["", "..", "/etc", "a/../.."])
def test_a_folder_outside_of_the_store_is_refused(folder, tmp_path):
    with pytest.raises(UnsafeError):
        SubfolderStore(LocalStore(str(tmp_path)), folder)
