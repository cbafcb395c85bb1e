"""SFTP: threads take turns at one connection, which is made anew when it broke; no refused byte goes unnoticed."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import fsspec
import pytest

from shardckpt.errors import StorageError, UsageError
from shardckpt.storage import retry
from shardckpt.storage.fsspec_store import FsspecStore, connect
from shardckpt.storage.resolve_url import kind
from shardckpt.storage.store import read_bytes
from shardckpt.testing.store_suite import put
from tests.kit.ranks.forks import is_killed
from tests.kit.stores.servers import make_key


@pytest.fixture
def store(sftp_folder: str, monkeypatch: pytest.MonkeyPatch) -> FsspecStore:
    monkeypatch.setattr(retry, "FIRST_PAUSE_S", 0.01)
    return FsspecStore(sftp_folder)


@pytest.fixture
def files(sftp_folder: str):
    return connect(sftp_folder)[0]


def cut(files) -> None:
    """Break the connection as a router does, without a word."""
    with files.turn:
        files.live().client.get_transport().sock.close()


def test_a_process_has_one_connection_to_a_server(store, files, sftp_folder):
    put(store, "a.bin", b"1")
    before = files.live()
    assert connect(f"{sftp_folder}/elsewhere")[0] is files
    assert kind(f"{sftp_folder}/a.bin") == "file"
    seen = []
    thread = threading.Thread(target=lambda: seen.append(connect(sftp_folder)[0]))
    thread.start()
    thread.join()
    assert seen == [files]
    assert files.live() is before


def test_a_connection_that_broke_is_made_anew(store, files):
    put(store, "a.bin", b"12345")
    for ask in (lambda: read_bytes(store, "a.bin", 0, 5), store.list, lambda: store.changed_at("."[:0] or "sub")):
        before = files.live()
        cut(files)
        ask()
        assert files.live() is not before


def test_an_upload_over_it_fails_and_leaves_nothing(store, files):
    put(store, "a.bin", b"old")
    writer = store.create("a.bin")
    writer.write(bytes(1 << 20))
    cut(files)
    with pytest.raises(StorageError, match=r"a\.bin"):
        for _ in range(3):
            writer.write(bytes(1 << 20))
        writer.close()
    writer.abort()
    assert [entry.name for entry in store.list()] == ["a.bin"]
    assert read_bytes(FsspecStore(store.url), "a.bin", 0, 3) == b"old"


def test_threads_may_write_and_read_at_once(store):
    datas = {f"{n}.bin": os.urandom(3 << 20) for n in range(4)}
    wrong = []

    def work(name: str, data: bytes) -> None:
        with store.create(name) as writer:
            for start in range(0, len(data), 700_001):
                writer.write(data[start : start + 700_001])
        if read_bytes(FsspecStore(store.url), name, 5, len(data) - 5) != data[5:]:
            wrong.append(name)

    threads = [threading.Thread(target=work, args=each) for each in datas.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert [entry.size for entry in store.list()] == [3 << 20] * 4


@pytest.mark.parametrize("nbytes", [1, 40_000, 4 << 20])
def test_a_byte_that_the_server_refuses_is_an_error(files, nbytes: int):
    upload = files.open("/dev/full", "wb")
    with pytest.raises(OSError, match="Failure"):
        upload.write(bytes(nbytes))
    upload.close()


def test_a_fork_has_a_connection_of_its_own_and_leaves_the_parents_alone(store, files, sftp_folder):
    put(store, "a.bin", b"parent")
    before = files.live()

    def work() -> None:
        mine = connect(sftp_folder)[0]
        assert mine is not files
        assert read_bytes(FsspecStore(sftp_folder), "a.bin", 0, 6) == b"parent"
        put(FsspecStore(sftp_folder), "b.bin", b"child")

    assert not is_killed(work)
    assert read_bytes(FsspecStore(sftp_folder), "b.bin", 0, 5) == b"child"
    assert files.live() is before


def test_a_wrong_key_is_told_at_once(sftp_server: str, tmp_path: Path, monkeypatch):
    make_key(tmp_path / "other")
    monkeypatch.setitem(fsspec.config.conf, "sftp", {**fsspec.config.conf["sftp"], "key_filename": f"{tmp_path}/other"})
    monkeypatch.setattr(retry, "FIRST_PAUSE_S", 60.0)
    with pytest.raises(StorageError, match="Authentication"):
        FsspecStore(sftp_server.replace("127.0.0.1", "localhost") + str(tmp_path)).list()


def test_a_server_whose_key_is_another_one_is_refused(files, sftp_server: str, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ssh").mkdir()
    address = f"[localhost]:{sftp_server.rpartition(':')[2]}"
    url = sftp_server.replace("127.0.0.1", "localhost") + str(tmp_path)
    make_key(tmp_path / "other")
    for key, good in ((files.live().client.get_transport().get_remote_server_key().get_base64(), True), ("", False)):
        wrong = (tmp_path / "other.pub").read_text().split()[1]
        (tmp_path / ".ssh" / "known_hosts").write_text(f"{address} ssh-ed25519 {key or wrong}\n")
        store = FsspecStore(url)
        store._fs.forget()
        if good:
            assert [entry.name for entry in store.list()]
        else:
            with pytest.raises(StorageError, match=r"somebody may pose.*localhost|localhost.*somebody may pose"):
                store.list()
    store._fs.forget()


def test_a_server_that_is_not_there_is_told(tmp_path: Path, monkeypatch):
    pytest.importorskip("paramiko")
    monkeypatch.setattr(retry, "FIRST_PAUSE_S", 0.01)
    with pytest.raises(StorageError, match="tried 4 times"):
        FsspecStore("sftp://nobody@127.0.0.1:9/x").list()
    with pytest.raises(UsageError, match="names no host"):
        FsspecStore("sftp:///x")
