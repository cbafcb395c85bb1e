"""Wrap formats of plugins so that errors name the plugin."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from shardckpt.dtypes import is_known
from shardckpt.errors import FormatError, StorageError, describe_with_class, escape
from shardckpt.format.reader import Checksum, Evidence, Format, ParamShapes, Reader, Source
from shardckpt.manifest import Encoded, ObjectEntry, Piece, Span, Strided
from shardckpt.plugins import Plugin, name_plugin, warn_of_plugin


def guard_format(form: Format, plugin: Plugin) -> Format:
    """Wrap a plugin's format: warn if it cannot recognize, raise typed errors."""

    def recognize(source: Source) -> Evidence:
        try:
            return form.recognize(source)
        except StorageError:
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001  (whatever it is, other formats must be asked)
            warn_of_plugin(f"the plugin {plugin} failed to look at {source.url}: {describe_with_class(error)}")
            return Evidence.NONE

    def open_(source: Source) -> Reader:
        with name_plugin(plugin, "open this", source.url, FormatError):
            return _guard_reader(form.open(source), plugin, source.url)

    return replace(form, recognize=recognize, open=open_)


def _guard_reader(reader: Reader, plugin: Plugin, where: str) -> Reader:
    """Check an open reader and wrap its methods so that errors name the plugin."""
    # The object remains the plugin's own, since a target of the same plugin may check its type.
    _check_reader(reader)
    resolve, load_object = reader.resolve, reader.load_object
    checksums, with_param_shapes = reader.checksums, reader.with_param_shapes

    def guarded_resolve(pieces: Sequence[Piece]) -> list[Piece]:
        with name_plugin(plugin, "find its tensors", where, FormatError):
            return _check_resolved(list(resolve(pieces)), len(pieces))

    def guarded_load_object(entry: ObjectEntry) -> object:
        with name_plugin(plugin, "read a value", where, FormatError):
            return load_object(entry)

    def guarded_checksums() -> Iterator[Checksum]:
        with name_plugin(plugin, "list its checksums", where, FormatError):
            yield from checksums()

    def guarded_with_param_shapes(known: ParamShapes) -> Reader:
        with name_plugin(plugin, "take the shapes of parameters", where, FormatError):
            found = with_param_shapes(known)
            return found if found is reader else _guard_reader(found, plugin, where)

    guarded: dict[str, Callable[..., object]] = {
        "resolve": guarded_resolve,
        "load_object": guarded_load_object,
        "checksums": guarded_checksums,
        "with_param_shapes": guarded_with_param_shapes,
    }
    for name, method in guarded.items():
        object.__setattr__(reader, name, method)  # works for frozen dataclasses too
    return reader


def _check_reader(reader: object) -> None:
    """Check the types in a plugin's reader. Raises TypeError."""
    if not isinstance(reader, Reader):
        raise TypeError(f"`open` must return a Reader, got {type(reader).__name__}")
    for file, size in reader.manifest.files.items():
        if type(size) is not int or size < -1:
            raise TypeError(f"the size of {file} must be a number of bytes, or -1 if it is missing, got {size!r}")
    for path, entry in reader.manifest.tensors.items():
        name = ".".join(map(str, path))
        if not (type(entry.shape) is tuple and all(type(length) is int for length in entry.shape)):
            raise TypeError(f"the shape of {name} must be a tuple of integers, got {entry.shape!r}")
        if not all(isinstance(dtype, str) and is_known(dtype) for dtype in (entry.stored, entry.dtype)):
            raise TypeError(f"the dtype of {name} must be a name such as float32, got {entry.dtype!r}")


def _check_resolved(pieces: list[Piece], wanted: int) -> list[Piece]:
    """Check the pieces that a plugin resolved. Raises TypeError."""
    if len(pieces) != wanted:
        raise TypeError(f"`resolve` must return {wanted} pieces, got {len(pieces)}")
    for piece in pieces:
        if not isinstance(piece, Piece) or not isinstance(piece.layout, (Span, Strided, Encoded)):
            raise TypeError(f"`resolve` must return pieces that are not lazy, got {escape(repr(piece))}")
    return pieces
