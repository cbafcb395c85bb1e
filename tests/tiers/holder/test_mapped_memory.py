"""Files in a holder's memory are written and read through maps, with the same bytes, size and seals as without."""

from __future__ import annotations

import fcntl
import os
import random
import shutil
import tempfile
from pathlib import Path

import pytest

from shardckpt.errors import NoSpaceError
from shardckpt.storage.store import read_bytes
from shardckpt.tiers.holder import mapped_memory
from shardckpt.tiers.holder.holder_store import HolderStore
from shardckpt.tiers.holder.holders import start_holder, stop_holders
from shardckpt.tiers.holder.mapped_memory import HUGE_BYTES, add_huge_pages, map_sealed

PARTS = [random.Random(size).randbytes(size) for size in (100, 2 * HUGE_BYTES + 5, 3, HUGE_BYTES, HUGE_BYTES - 108, 7)]


@pytest.fixture(params=[True, False], ids=["huge pages", "small pages"])
def store(request, monkeypatch):
    """A store whose files have huge pages, where the system has them, or small ones."""
    monkeypatch.setattr(mapped_memory, "has_cheap_huge_pages", lambda: request.param)
    folder = tempfile.mkdtemp()
    monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
    start_holder("mapped", 32 << 20, last="COMMIT")
    yield HolderStore("shardckpt-memory://mapped")
    stop_holders()
    shutil.rmtree(folder)


def write(store: HolderStore, name: str) -> None:
    with store.create(name) as writer:
        for part in PARTS:
            writer.write(part)


def test_a_file_has_the_written_bytes_and_no_more_and_is_sealed(store):
    write(store, "s/a")
    assert store.size("s/a") == sum(map(len, PARTS))
    assert read_bytes(store, "s/a", 0, store.size("s/a")) == b"".join(PARTS)
    assert fcntl.fcntl(store._open("s/a").fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE
    with pytest.raises(PermissionError):
        os.pwrite(store._open("s/a").fd, b"x", 0)


def test_a_process_forked_while_a_file_is_written_keeps_none_of_its_memory(store):
    writer = store.create("s/a")
    writer.write(b"1" * 100)
    memory = writer.extend(2 * HUGE_BYTES)  # None with small pages
    asking, answer = os.pipe()
    pid = os.fork()
    if not pid:
        held = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
        held += Path("/proc/self/maps").read_text().splitlines()
        del memory
        os.write(answer, "\n".join(each for each in held if "memfd:shardckpt" in each).encode() or b"nothing")
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(asking, 10_000) == b"nothing"
    os.close(asking)
    os.close(answer)
    assert memory is None or len(memory) == 2 * HUGE_BYTES
    writer.abort()


def test_a_view_has_the_bytes_of_the_file_also_after_its_removal(store):
    write(store, "s/a")
    view = store.view("s/a", 50, 2 * HUGE_BYTES)
    assert view is not None and store.view("s/a", 50, 100) is None
    assert store.view("s/a", HUGE_BYTES, 4 * HUGE_BYTES) is None
    store.delete("s/a")
    write(store, "s/a")
    assert bytes(view) == b"".join(PARTS)[50 : 50 + len(view)]


def test_memory_that_a_process_could_shorten_is_not_mapped():
    memory = os.memfd_create("open", os.MFD_ALLOW_SEALING)
    os.write(memory, b"x" * HUGE_BYTES)
    assert map_sealed(memory) is None
    fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    assert map_sealed(memory) == b"x" * HUGE_BYTES
    os.close(memory)


def test_bytes_that_a_caller_fills_are_those_of_the_file(store):
    with store.create("s/a") as writer:
        writer.write(PARTS[0])
        for number in (1, 2):
            memory = writer.extend(3 * HUGE_BYTES)
            if memory is None:
                writer.write(bytes([number]) * 3 * HUGE_BYTES)
            else:
                memory[:] = bytes([number]) * len(memory)
            del memory
        writer.write(PARTS[0])
    expected = PARTS[0] + b"\1" * 3 * HUGE_BYTES + b"\2" * 3 * HUGE_BYTES + PARTS[0]
    assert read_bytes(store, "s/a", 0, store.size("s/a")) == expected
    assert fcntl.fcntl(store._open("s/a").fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE


def test_a_file_beyond_the_maximum_is_refused_before_it_has_memory(store):
    with pytest.raises(NoSpaceError), store.create("s/a") as writer:
        writer.extend(64 << 20)
    assert store.list() == []


def test_a_host_that_takes_free_pages_gives_no_huge_ones(tmp_path, monkeypatch):
    balloon: Path = tmp_path / "virtio0"
    balloon.mkdir()
    monkeypatch.setattr(mapped_memory, "_BALLOONS", str(tmp_path))
    for features, is_cheap in (("01100100", False), ("01100000", True), ("", True)):
        (balloon / "features").write_text(features + "\n")
        mapped_memory.has_cheap_huge_pages.cache_clear()
        assert mapped_memory.has_cheap_huge_pages() is is_cheap
    mapped_memory.has_cheap_huge_pages.cache_clear()
    monkeypatch.setattr(mapped_memory, "has_cheap_huge_pages", lambda: False)
    memory = os.memfd_create("small")
    assert add_huge_pages(memory, 0, HUGE_BYTES) is None and os.fstat(memory).st_size == 0
    os.close(memory)
