"""Conformance suite for readers: recognition, complete reads, typed errors."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import shardckpt
from shardckpt.encodings.element_values import numpy_dtype
from shardckpt.errors import CheckpointError, ShardckptError
from shardckpt.manifest import UNREAD, Lazy, dotted
from shardckpt.plan.layout.coverage import locate
from shardckpt.reader import Evidence, Format, Reader
from shardckpt.readers.chunk_reader import read_blocks
from shardckpt.readers.registry import detect, open_source

GARBAGE = (b"", b"\0" * 64, b"{", b"PK\x03\x04", b"\x80\x04\x95", b"\xff" * 200)


class ReaderSuite:
    """Tests for one `Format`.

    A subclass sets `form` and provides a `checkpoint` fixture; the format must be installed.

    Attributes:
        form: The format under test.
        expected: Values that the checkpoint must contain, bit by bit, by dotted name; further tensors may exist.
    """

    form: Format
    expected: Mapping[str, NDArray[np.generic]] = {}

    @pytest.fixture
    def checkpoint(self, tmp_path: Path) -> Path:
        """Return a file or folder in the format, below `tmp_path`."""
        raise NotImplementedError

    def open(self, path: Path) -> Reader:
        """Open a checkpoint with the format under test."""
        return self.form.open(open_source(str(path)))

    def test_it_recognizes_its_own_format(self, checkpoint: Path) -> None:
        assert self.form.recognize(open_source(str(checkpoint))) > Evidence.NONE
        assert detect(open_source(str(checkpoint))).name == self.form.name

    def test_it_recognizes_nothing_else(self, tmp_path: Path) -> None:
        other = tmp_path / "other"
        other.mkdir()
        assert self.form.recognize(open_source(str(other))) is Evidence.NONE
        (other / "README.md").write_text("notes")
        (other / "data").mkdir()
        (other / "data" / "train.csv").write_text("1,2")
        assert self.form.recognize(open_source(str(other))) is Evidence.NONE
        assert self.form.recognize(open_source(str(other / "README.md"))) is Evidence.NONE

    @pytest.mark.parametrize("content", GARBAGE, ids=range(len(GARBAGE)))
    def test_damaged_files_never_make_it_raise_an_untyped_error(self, checkpoint: Path, content: bytes) -> None:
        for file in _files(checkpoint):
            before = file.read_bytes()
            file.write_bytes(content)
            if self.form.recognize(open_source(str(checkpoint))) is not Evidence.NONE:
                self._read_if_sound(checkpoint)
            file.write_bytes(before)

    def test_every_element_is_in_the_files(self, checkpoint: Path) -> None:
        reader = self.open(checkpoint)
        manifest = reader.manifest
        assert manifest.tensors
        assert manifest.format
        for path, entry in manifest.tensors.items():
            assert entry.path == path
        for entry in locate(reader, manifest, list(manifest.tensors.values())):
            assert not any(isinstance(piece.layout, Lazy) for piece in entry.pieces)
        for name, size in manifest.files.items():
            assert size == -1 or name in manifest.elsewhere or size == reader.store.size(name)

    def test_values_are_read_bit_by_bit(self, checkpoint: Path) -> None:
        reader = self.open(checkpoint)
        entries = {dotted(path): entry for path, entry in reader.manifest.tensors.items()}
        for name, expected in self.expected.items():
            assert name in entries
            [entry] = locate(reader, reader.manifest, [entries[name]])
            data = b"".join(map(bytes, read_blocks(reader, entry)))
            assert entry.shape == expected.shape
            assert numpy_dtype(entry.stored) == expected.dtype
            assert data == expected.tobytes()

    def test_values_that_are_not_tensors_can_be_read(self, checkpoint: Path) -> None:
        reader = self.open(checkpoint)
        for path, entry in reader.manifest.objects.items():
            assert path not in reader.manifest.tensors
            assert entry.value is not UNREAD or reader.load_object(entry) is not UNREAD

    def test_a_file_that_ends_early_is_a_typed_error(self, checkpoint: Path) -> None:
        names = {piece.file for entry in self.open(checkpoint).manifest.tensors.values() for piece in entry.pieces}
        for file in [file for file in _files(checkpoint) if file.name in {name.rpartition("/")[2] for name in names}]:
            before = file.read_bytes()
            file.write_bytes(before[: len(before) // 2])
            assert not self._read_if_sound(checkpoint)
            file.write_bytes(before)

    def test_a_missing_file_is_a_typed_error_or_holds_nothing(self, checkpoint: Path) -> None:
        everything = len(self.open(checkpoint).manifest.tensors)
        for file in [file for file in _files(checkpoint) if file != checkpoint]:
            before = file.read_bytes()
            file.unlink()
            if self.form.recognize(open_source(str(checkpoint))) is not Evidence.NONE:
                reader = self._read_if_sound(checkpoint)
                has_shapes = reader is not None and reader.manifest.has_shapes
                assert not has_shapes or len(reader.manifest.tensors) <= everything  # type: ignore[union-attr]
            file.write_bytes(before)

    def test_reading_changes_no_file(self, checkpoint: Path) -> None:
        before = {file: file.read_bytes() for file in _files(checkpoint)}
        shardckpt.inspect(checkpoint)
        shardckpt.verify(checkpoint)
        assert {file: file.read_bytes() for file in _files(checkpoint)} == before

    def test_verify_finds_no_fault(self, checkpoint: Path) -> None:
        assert shardckpt.verify(checkpoint).ok

    def test_nothing_is_lost_in_a_native_step(self, checkpoint: Path, tmp_path: Path) -> None:
        shardckpt.reshard(checkpoint, tmp_path / "step", world_size=2, allow_loss=True)
        comparison = shardckpt.diff(checkpoint, tmp_path / "step")
        assert comparison.same, comparison

    def test_a_copy_elsewhere_is_the_same_checkpoint(self, checkpoint: Path, tmp_path: Path) -> None:
        copy = tmp_path / "copy" / checkpoint.name
        copy.parent.mkdir()
        (shutil.copytree if checkpoint.is_dir() else shutil.copy)(checkpoint, copy)
        assert shardckpt.diff(checkpoint, copy).same

    def _read_if_sound(self, checkpoint: Path) -> Reader | None:
        """Return the reader after it read all bytes; None after a typed error."""
        try:
            reader = self.open(checkpoint)
            for entry in locate(reader, reader.manifest, list(reader.manifest.tensors.values())):
                for _ in read_blocks(reader, entry):
                    pass
            for value in reader.manifest.objects.values():
                if value.value is UNREAD:
                    reader.load_object(value)
        except ShardckptError as error:
            assert isinstance(error, (CheckpointError, OSError, ValueError))
            return None
        return reader


def _files(checkpoint: Path) -> Iterator[Path]:
    if checkpoint.is_file():
        return iter([checkpoint])
    return iter(sorted(file for file in checkpoint.rglob("*") if file.is_file()))
