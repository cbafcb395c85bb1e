"""Conformance suite for stores: atomic reads and writes of named bytes."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from shardckpt.errors import MissingFileError, StorageError, TruncatedError, UnsafeError
from shardckpt.storage.local import LocalStore
from shardckpt.storage.publish import find_missing_files
from shardckpt.storage.store import Listed, Read, Store, read_bytes

CONTENT = bytes(range(256)) * 40


def put(store: Store, name: str, data: bytes = CONTENT) -> None:
    """Write a file."""
    with store.create(name) as writer:
        writer.write(data)


class StoreSuite:
    """Tests for one `Store`. A subclass provides an empty store as the fixture `store`.

    Attributes:
        knows_times: Whether the store reports when a file last changed.
    """

    knows_times = True

    @pytest.fixture
    def store(self) -> Store:
        """Return an empty store."""
        raise NotImplementedError

    def test_it_is_a_store_and_has_a_url(self, store: Store) -> None:
        assert isinstance(store, Store)
        assert store.url

    def test_what_is_written_is_read_back(self, store: Store) -> None:
        put(store, "a.bin")
        assert read_bytes(store, "a.bin", 0, len(CONTENT)) == CONTENT
        assert store.size("a.bin") == len(CONTENT)

    def test_ranges_of_many_files_fill_their_buffers_in_one_call(self, store: Store) -> None:
        put(store, "a.bin")
        put(store, "b.bin", CONTENT[::-1])
        wanted = [("a.bin", 7, 100), ("b.bin", 0, 1), ("a.bin", 5000, 240), ("a.bin", 50, 100), ("b.bin", 9000, 1240)]
        buffers = [bytearray(nbytes) for *_, nbytes in wanted]
        store.read([Read(name, start, memoryview(b)) for (name, start, _), b in zip(wanted, buffers, strict=True)])
        for (name, start, nbytes), buffer in zip(wanted, buffers, strict=True):
            content = CONTENT if name == "a.bin" else CONTENT[::-1]
            assert buffer == content[start : start + nbytes]

    def test_a_buffer_of_any_type_is_filled_as_bytes(self, store: Store) -> None:
        put(store, "a.bin", bytes(range(8)))
        buffer = bytearray(8)
        store.read([Read("a.bin", 0, memoryview(buffer).cast("I"))])
        assert buffer == bytes(range(8))

    def test_nothing_is_read_of_nothing(self, store: Store) -> None:
        put(store, "empty.bin", b"")
        assert store.size("empty.bin") == 0
        assert read_bytes(store, "empty.bin", 0, 0) == b""
        store.read([])

    @pytest.mark.parametrize(("start", "nbytes"), [(0, len(CONTENT) + 1), (len(CONTENT), 1), (1 << 40, 5)])
    def test_a_range_beyond_the_end_is_truncation_that_names_the_file(
        self, store: Store, start: int, nbytes: int
    ) -> None:
        put(store, "a.bin")
        with pytest.raises(TruncatedError, match=r"a\.bin"):
            read_bytes(store, "a.bin", start, nbytes)

    def test_a_missing_file_is_a_file_not_found_error_of_ours(self, store: Store) -> None:
        for ask in (lambda: store.size("no.bin"), lambda: read_bytes(store, "no.bin", 0, 1)):
            with pytest.raises(MissingFileError, match=r"no\.bin") as caught:
                ask()
            assert isinstance(caught.value, StorageError)
            assert isinstance(caught.value, FileNotFoundError)
            assert caught.value.exit_code == 3

    def test_a_folder_is_no_file(self, store: Store) -> None:
        put(store, "sub/a.bin")
        with pytest.raises(MissingFileError):
            store.size("sub")

    def test_listing_is_sorted_and_has_sizes_and_folders(self, store: Store) -> None:
        put(store, "b.bin", b"123")
        put(store, "a.bin", b"1")
        put(store, "sub/deep/c.bin", b"12")
        assert store.list() == [Listed("a.bin", 1, False), Listed("b.bin", 3, False), Listed("sub", 0, True)]
        assert store.list("sub") == [Listed("sub/deep", 0, True)]
        assert store.list("sub/deep") == [Listed("sub/deep/c.bin", 2, False)]

    def test_a_file_that_is_not_there_or_of_another_size_is_missing_for_every_reader(self, store: Store) -> None:
        put(store, "a.bin", b"123")
        put(store, "b.bin", b"12")
        assert find_missing_files(store.url, [{"a.bin": 3, "b.bin": 2}]) == {}
        assert find_missing_files(store.url, [{"c.bin": 3, "a.bin": 3, "b.bin": 3}]) == {"c.bin": None, "b.bin": 2}

    def test_a_folder_that_is_not_there_lists_as_empty(self, store: Store) -> None:
        assert store.list() == []
        assert store.list("nowhere") == []

    @pytest.mark.parametrize(
        "name", ["", "/etc/passwd", "../a.bin", "sub/../../a.bin", "..", "a\0b", "sub/..", "\ud800.bin"]
    )
    def test_a_name_that_could_leave_the_root_is_refused_everywhere(self, store: Store, name: str) -> None:
        for ask in (
            lambda: store.size(name),
            lambda: read_bytes(store, name, 0, 1),
            lambda: store.create(name),
            lambda: store.delete(name),
            lambda: store.list(name or "/"),
        ):
            with pytest.raises(UnsafeError):
                ask()

    @pytest.mark.parametrize("name", ["a b.bin", "ü.bin", "a#b?c.bin", "a%20b.bin", "...bin", "[a]*.bin"])
    def test_odd_names_are_just_names(self, store: Store, name: str) -> None:
        put(store, name, b"1")
        assert [entry.name for entry in store.list()] == [name]
        assert read_bytes(store, name, 0, 1) == b"1"
        store.delete(name)
        assert store.list() == []

    def test_writing_replaces(self, store: Store) -> None:
        put(store, "a.bin", CONTENT)
        assert read_bytes(store, "a.bin", 0, 4) == CONTENT[:4]
        put(store, "a.bin", b"new!!")
        assert store.size("a.bin") == 5
        assert read_bytes(store, "a.bin", 0, 5) == b"new!!"

    def test_many_small_writes_become_one_file(self, store: Store) -> None:
        with store.create("a.bin") as writer:
            for start in range(0, len(CONTENT), 1000):
                writer.write(memoryview(CONTENT)[start : start + 1000])
            writer.write(b"")
        assert read_bytes(store, "a.bin", 0, len(CONTENT)) == CONTENT

    def test_nothing_is_seen_before_close(self, store: Store) -> None:
        writer = store.create("a.bin")
        writer.write(CONTENT)
        assert "a.bin" not in [entry.name for entry in store.list()]
        writer.close()
        assert [entry.name for entry in store.list()] == ["a.bin"]

    def test_an_exception_leaves_nothing(self, store: Store) -> None:
        with pytest.raises(KeyboardInterrupt), store.create("a.bin") as writer:
            writer.write(CONTENT)
            raise KeyboardInterrupt
        assert store.list() == []

    def test_an_aborted_file_leaves_what_was_there_before(self, store: Store) -> None:
        put(store, "a.bin", b"old")
        writer = store.create("a.bin")
        writer.write(b"new")
        writer.abort()
        writer.abort()
        assert read_bytes(store, "a.bin", 0, 3) == b"old"
        assert len(store.list()) == 1

    def test_closing_or_aborting_a_closed_file_changes_nothing(self, store: Store) -> None:
        with store.create("a.bin") as writer:
            writer.write(b"1")
        writer.close()
        writer.abort()
        assert store.size("a.bin") == 1

    def test_a_folder_is_removed_with_all_it_holds_and_nothing_else(self, store: Store) -> None:
        for name in ("gone/a.bin", "gone/deep/er/b.bin", "gone.bin", "kept/a.bin"):
            put(store, name, b"1")
        store.delete_folder("gone")
        store.delete_folder("gone")
        assert [entry.name for entry in store.list()] == ["gone.bin", "kept"]
        assert read_bytes(store, "kept/a.bin", 0, 1) == b"1"
        with pytest.raises(UnsafeError):
            store.delete_folder("../gone")

    def test_named_files_are_removed_once_or_again_and_a_folder_with_its_last(self, store: Store) -> None:
        put(store, "a.bin")
        store.delete("a.bin")
        store.delete("a.bin")
        assert store.list() == []
        for name in ("sub/a.bin", "sub/b.bin", "sub/c.bin"):
            put(store, name, b"1")
        store.delete_files("sub", {"a.bin", "b.bin", "never-there.bin"})
        assert [entry.name for entry in store.list("sub")] == ["sub/c.bin"]
        store.delete_files("sub", {"c.bin"})
        store.delete_files("sub", {"c.bin"})
        assert store.list() == []
        with pytest.raises(UnsafeError):
            store.delete_files("..", {"a.bin"})

    def test_the_time_of_the_last_change_in_a_folder_is_returned_if_it_is_known(self, store: Store) -> None:
        before = time.time()
        put(store, "sub/deep/a.bin", b"1")
        changed = store.changed_at("sub")
        assert (changed is not None) == self.knows_times
        assert changed is None or abs(changed - before) < 60
        assert store.changed_at("nowhere") is None

    @pytest.mark.parametrize("other", ["itself", "disk"])
    def test_a_range_is_copied_from_this_store_and_from_another_kind(
        self, store: Store, tmp_path: Path, other: str
    ) -> None:
        source = store if other == "itself" else LocalStore(str(tmp_path / "other"))
        put(source, "a.bin")
        with store.create("b.bin") as writer:
            writer.write(b"head")
            writer.copy_from(source, "a.bin", 100, 9000)
            writer.copy_from(source, "a.bin", 3, 0)
            writer.copy_from(source, "a.bin", 0, 7)
            writer.write(b"tail")
        assert read_bytes(store, "b.bin", 0, 9015) == b"head" + CONTENT[100:9100] + CONTENT[:7] + b"tail"
        assert store.size("b.bin") == 9015

    def test_a_copy_beyond_the_end_is_truncation_and_leaves_nothing(self, store: Store) -> None:
        put(store, "a.bin")
        with pytest.raises(TruncatedError, match=r"a\.bin"), store.create("b.bin") as writer:
            writer.copy_from(store, "a.bin", 100, len(CONTENT))
        assert [entry.name for entry in store.list()] == ["a.bin"]
