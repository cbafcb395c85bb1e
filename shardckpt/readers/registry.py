"""Detect and open the format of a path or URL, by structure, else by names."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib import import_module
from itertools import islice, zip_longest
from typing import NamedTuple

from shardckpt.dtypes import is_known
from shardckpt.errors import (
    CheckpointError,
    FormatError,
    StorageError,
    UnknownFormatError,
    UsageError,
    describe_with_class,
    escape,
)
from shardckpt.manifest import Encoded, ObjectEntry, Piece, Span, Strided, split_numbers
from shardckpt.notebook import Result
from shardckpt.plugins import Plugin, find_plugins, load_plugin, name_plugin, warn_of_plugin
from shardckpt.reader import (
    NESTED_STEP,
    Checksum,
    Evidence,
    Format,
    NamedBases,
    ParamShapes,
    Reader,
    Source,
    require_bases,
)
from shardckpt.storage.local import LocalStore
from shardckpt.storage.resolve_url import as_url, kind, not_found_error, open_store, split, split_step_suffix
from shardckpt.storage.store import Listed, Store, SubfolderStore, WrappedStore
from shardckpt.storage.thread_pool import ThreadPool


class BuiltIn(NamedTuple):
    """A built-in format, imported only if a source may have it: importing all of them takes 0.05 s."""

    name: str  # name of the format
    module: str  # module that contains the format
    names: str  # regular expression that matches at least one name in each folder of this format
    attribute: str = "FORMAT"  # name of the format in the module

    def may_recognize(self, source: Source) -> bool:
        """Return True if the names in a folder allow this format; always True for a file."""
        return source.file is not None or any(map(re.compile(self.names).fullmatch, source.listing))

    def load(self) -> Format:
        """Import and return the format."""
        form: Format = getattr(import_module(self.module), self.attribute)
        return form


_NATIVE, _COMMIT = "native", "COMMIT"
# Built-in formats. Those that contain other formats come first. The last one never matches a folder.
BUILT_IN = (
    BuiltIn(_NATIVE, "shardckpt.native.reader", rf"{_COMMIT}|[0-9a-z]+-\d{{5,}}-\d{{2,}}\.safetensors"),
    BuiltIn(
        "stream",
        "shardckpt.stream.versions.version_reader",
        r"STREAM\.json|COMMIT\.json|anchor|delta-\d{5}-[0-9a-f]{8}\.safetensors",
    ),
    BuiltIn("deepspeed-universal", "shardckpt.readers.deepspeed.universal", r"zero|latest_universal"),
    BuiltIn("deepspeed", "shardckpt.readers.deepspeed.reader", r"(?s)latest|global_step.*|.*_states\.pt"),
    BuiltIn(
        "accelerate", "shardckpt.readers.frameworks.accelerate", r"(?s)pytorch_model_fsdp.*|random_states_\d+\.pkl"
    ),
    BuiltIn("composer", "shardckpt.readers.frameworks.composer", r"composer_metadata\.json"),
    BuiltIn("torch-checkpointing", "shardckpt.readers.frameworks.torch_checkpointing", r"metadata\.pkl"),
    BuiltIn("fabric", "shardckpt.readers.frameworks.lightning", r"meta\.pt"),
    BuiltIn("megatron", "shardckpt.readers.frameworks.megatron", r"metadata\.json"),
    BuiltIn("dcp", "shardckpt.readers.dcp.reader", r"(?s).*(\.metadata|\.distcp)"),
    BuiltIn(
        "hf-delta", "shardckpt.stream.versions.hf_delta_format", r"model\.safetensors\.index\.json|.*\.safetensors"
    ),
    BuiltIn("safetensors", "shardckpt.readers.huggingface.reader", r"(?s)sharded|.*\.safetensors(\.index\.json)?"),
    BuiltIn("hf-torch", "shardckpt.readers.frameworks.torch_files", r"(?s).*\.bin(\.index\.json)?", "HF_FORMAT"),
    BuiltIn("torch-folder", "shardckpt.readers.frameworks.torch_files", r"(?s).*\.(pt|pth|bin|ckpt)", "LOOSE_FORMAT"),
    BuiltIn("torch", "shardckpt.readers.frameworks.torch_files", r"(?!)", "FILE_FORMAT"),
)

# Entry point groups of plugins: formats that are tried before the built-in ones, and after them.
_FIRST, _LAST = "shardckpt.formats.first", "shardckpt.formats"

_POINT_AT_CHECKPOINT = "Point at the folder or file that holds the checkpoint."
_READ_ITS_SOURCE = "Name the checkpoint that it was made from; gguf.GGUFReader in the package gguf reads its tensors."
# File names of known other formats, with a description of the folder and a remedy.
_FOREIGN = (
    (
        ("_CHECKPOINT_METADATA", "manifest.ocdbt", "_METADATA", "_sharding"),
        "an Orbax (JAX) folder, which needs TensorStore to read",
        "Restore it in JAX and write its arrays with safetensors.flax.save_file.",
    ),
    (
        ("latest_checkpointed_iteration.txt",),
        "a Megatron folder with several iterations",
        "Point at one iter_*.",
    ),
    (
        ("mp_rank_00", "mp_rank_00_000"),
        "an iteration of Megatron's older format, sharded by tensor parallelism as only its code knows",
        "Convert it with Megatron's tools/checkpoint/convert.py, or save it with --ckpt-format torch_dist.",
    ),
    (
        ("latest", "zero_to_fp32.py"),
        "a DeepSpeed folder without the folder with state files that `latest` names",
        "Copy that folder next to it.",
    ),
    (
        ("checkpoint-1", "trainer_state.json"),
        "a transformers Trainer's folder without model files",
        _POINT_AT_CHECKPOINT,
    ),
    ((_COMMIT,), "a shardckpt step without its manifest and its files", _POINT_AT_CHECKPOINT),
)

_SHOWN = 8
_AT_ONCE = 8
_LEVELS = 4  # levels of subfolders to search for checkpoints: Lightning puts its files three levels deep
_FOLDERS = {True: 500, False: 64}  # maximum folders to search, local and remote
_NAMES = 100_000  # maximum names to read in these folders


def iter_formats() -> Iterator[Format]:
    """Return all formats in the order in which they are tried."""
    return _iter_formats(lambda _: True)


def _iter_formats(is_wanted: Callable[[BuiltIn], bool]) -> Iterator[Format]:
    """Yield the plugins' formats and the wanted built-in ones, imported on demand."""
    yield from _load_formats(_FIRST, tuple(sys.path))
    yield from (built_in.load() for built_in in BUILT_IN if is_wanted(built_in))
    yield from _load_formats(_LAST, tuple(sys.path))


@cache
def _load_formats(group: str, _path: tuple[str, ...]) -> tuple[Format, ...]:
    """Return the plugins' formats; skip those that fail to load, with a warning."""
    formats = []
    for plugin in find_plugins((_FIRST, _LAST), tuple(built_in.name for built_in in BUILT_IN)):
        try:
            if plugin.group == group:
                formats.append(guard_format(load_plugin(plugin, Format), plugin))
        except UsageError as error:
            warn_of_plugin(str(error))
    return tuple(formats)


def resolve_step(path: str | os.PathLike[str]) -> str:
    """Return the path or URL of the checkpoint that a caller names; of a step for `RUN@latest`."""
    url = as_url(path)
    if split_step_suffix(url) is None:
        return url
    from shardckpt.readers.step_paths import find_step  # noqa: PLC0415  (few paths name a run's step)

    return find_step(url)


def open_source(url: str, bases: NamedBases = "") -> Source:
    """Return the unopened source at a path or URL."""
    require_bases(bases)
    found = kind(url)
    if found == "missing":
        raise not_found_error(url, "there is nothing here")
    if found == "file":
        parent, name = split(url)
        return Source(open_store(parent), name, bases)
    source = Source(open_store(url), bases=bases)
    return find_nested_step(source) or source


def find_nested_step(source: Source) -> Source | None:
    """Return the step in a folder of Accelerate's `save_state`; None in others, and if the folder is a checkpoint."""
    if NESTED_STEP not in source.folders or _probe_nearby(source) is not None:
        return None
    inside = Source(open_store(f"{source.store.url.rstrip('/')}/{NESTED_STEP}"), bases=source.bases)
    form = _probe_nearby(inside)
    return inside if form is not None and form.name == _NATIVE else None


def detect(source: Source) -> Format:
    """Return a source's format."""
    found = _require_format(source)
    if source.bases and found.name != _NATIVE:
        raise UsageError("this checkpoint has no base", where=source.url, found=found.title)
    return found


def _require_format(source: Source) -> Format:
    form = _probe(source)
    if form is not None:
        return form
    if not source.listing:
        raise UnknownFormatError("this folder is empty", where=source.url)
    what, fix = _explanation(source)
    raise (_suggest_nearby(source) if fix == _POINT_AT_CHECKPOINT else None) or _unknown_error(source, what, fix)


def _probe(source: Source, least: Evidence = Evidence.NAME) -> Format | None:
    """Return the format that recognizes a source, preferably by structure; else None."""
    named: Format | None = None
    for candidate in _iter_formats(lambda built_in: built_in.may_recognize(source)):
        evidence = candidate.recognize(source) if candidate.may_recognize(source) else Evidence.NONE
        if evidence is Evidence.STRUCTURE:
            return candidate
        if evidence is least and named is None:
            named = candidate
    return named


def _suggest_nearby(source: Source) -> UnknownFormatError | None:
    """Return the error that suggests a checkpoint one level above or below; else None."""
    if source.file is not None:
        form = _probe_nearby(Source(source.store))
        if form is None:
            return None
        return UnknownFormatError(
            "this file is not a checkpoint by itself, but its folder is one",
            where=source.url,
            found=f"{source.store.url} ({form.name})",
            fix="Point at that folder.",
            nearby=source.store.url,
        )
    below = _checkpoints_below(source)
    if not below:
        return None
    paths = [path for path, _ in below]
    newest = _choose_newest(source.store, paths)
    return UnknownFormatError(
        "this folder is not a checkpoint itself, but holds some",
        where=source.url,
        found=_show_last([f"{path} ({form.name})" for path, form in below]),
        fix=f"Point at one of them{', such as the newest' if newest else ''}.",
        nearby=f"{source.url.rstrip('/')}/{newest or paths[0]}" if newest or len(paths) == 1 else "",
    )


def _choose_newest(store: Store, paths: list[str]) -> str:
    """Return the newest complete step if all are of one run; empty if none is."""
    from shardckpt.native.run_directory import is_step_name, read_step  # noqa: PLC0415  (as any other format)

    runs, _, names = zip(*(path.rpartition("/") for path in paths), strict=True)
    if len(paths) == 1 or len(set(runs)) > 1 or not all(map(is_step_name, names)):
        return ""
    run = SubfolderStore(store, runs[0]) if runs[0] else store
    for path, name in zip(reversed(paths), reversed(names), strict=True):
        with suppress(StorageError, CheckpointError):
            if read_step(run, int(name.rpartition("-")[2]), name).is_complete:
                return path
    return ""


def _checkpoints_below(source: Source) -> list[tuple[str, Format]]:
    """Return the nearest checkpoints below a folder, all on one level, by path; at most `_SHOWN` and one."""
    store = _FirstNames(source.store, _NAMES)
    left = _FOLDERS[store.capabilities.is_local]
    level = [name for name in _list_folders(source) if not name.startswith(".")]
    with ThreadPool(_AT_ONCE, thread_name_prefix="shardckpt-look") as pool:
        for depth in range(1, _LEVELS + 1):
            level, left = level[:left], left - len(level)
            found: list[tuple[str, Format]] = []
            deeper: list[list[str]] = []
            look = partial(_look_into, store, depth)
            for start in range(0, len(level), _AT_ONCE):
                looks = pool.map(look, level[start : start + _AT_ONCE])
                for path, (form, folders) in zip(level[start:], looks, strict=False):
                    deeper.append(folders)
                    found += [(path, form)] if form is not None else []
                if len(found) > _SHOWN:
                    break
            if found:
                return sorted(found[: _SHOWN + 1], key=lambda each: split_numbers(each[0]))
            level = [path for paths in zip_longest(*deeper) for path in paths if path is not None]
            if not level or left <= 0:
                break
    return []


def _look_into(store: Store, depth: int, path: str) -> tuple[Format | None, list[str]]:
    """Return a subfolder's format, and its subfolders in reverse order."""
    # Directly below the searched folder, file names are sufficient evidence.
    source = Source(SubfolderStore(store, path))
    try:
        form = _probe(source, Evidence.NAME if depth == 1 else Evidence.STRUCTURE)
        return form, [f"{path}/{name}" for name in _list_folders(source) if not name.startswith(".")]
    except (StorageError, CheckpointError):  # the folder is unreadable, or a link to another place
        return None, []


def _list_folders(source: Source) -> list[str]:
    """Return subfolder names in reverse order, so that the newest step comes first."""
    return sorted(source.folders, key=split_numbers, reverse=True)


class _FirstNames(WrappedStore):
    """A store that lists a limited number of names in all folders together."""

    def __init__(self, store: Store, most: int) -> None:
        super().__init__(store)
        self._left = most

    def list(self, folder: str = "") -> list[Listed]:
        """Return the folder's first entries, within the limit."""
        most = max(self._left, 0)
        if isinstance(self._store, LocalStore):
            found = list(self._store.list_first(folder, most))
        else:
            found = self._store.list(folder)[:most]
        self._left -= len(found)
        return found


def _probe_nearby(source: Source) -> Format | None:
    """Return a place's format during a search; None if it is unreadable."""
    try:
        return _probe(source)
    except StorageError:
        return None


def checkpoint_in(url: str) -> str:
    """Describe the checkpoint that a folder is, contains, or looks like; return an empty text without one."""
    if kind(url) != "folder":
        return ""
    source = open_source(url)
    form = _probe_nearby(source)
    if form is not None:
        return f"a checkpoint ({form.title})"
    what, _ = _explanation(source)
    if what:
        return what.removeprefix(": this looks like ")
    below = _checkpoints_below(source)
    return _shorten(list(dict.fromkeys(_describe_run(path) or f"{path} ({form.name})" for path, form in below)))


def _describe_run(path: str) -> str:
    """Describe the run if a path is its step; else return an empty text."""
    from shardckpt.native.run_directory import is_step_name  # noqa: PLC0415  (as any other format)

    run, _, name = path.rpartition("/")
    return f"{run} (a run)" if run and is_step_name(name) else ""


def _shorten(shown: list[str]) -> str:
    """Return the first ones among several texts, joined, with an ellipsis if there are more."""
    return ", ".join(shown[:_SHOWN]) + (", ..." if len(shown) > _SHOWN else "")


def _show_last(shown: list[str]) -> str:
    """Return the last ones among several texts, joined; an ellipsis stands for more."""
    return ("..., " if len(shown) > _SHOWN else "") + ", ".join(shown[-_SHOWN:])


def _unknown_error(source: Source, what: str, fix: str) -> UnknownFormatError:
    looked_for = f"one of {len(list(iter_formats()))} formats, which `shardckpt formats` lists"
    return UnknownFormatError(
        f"no reader recognizes this{what}",
        where=source.url,
        found=_describe_content(source),
        expected=looked_for if fix == _POINT_AT_CHECKPOINT else "",
        fix=fix,
    )


def open_checkpoint(url: str, bases: NamedBases = "") -> Reader:
    """Open the checkpoint at a path or URL, in any format."""
    return open_reader(open_source(url, bases))


def open_reader(source: Source) -> Reader:
    """Open a source in its format."""
    try:
        return detect(source).open(source)
    except (CheckpointError, UnknownFormatError) as error:
        for name in islice(filter(_WEIGHTS.fullmatch, source.files), _LOOKED_AT):
            _reject_placeholder(source, name, error)
        raise


def _reject_placeholder(source: Source, name: str, cause: Exception) -> None:
    """Raise FormatError if a file is what a download left instead of its content."""
    head = source.head(name).lower().lstrip()
    where = f"{source.store.url.rstrip('/')}/{name}"
    if head.startswith(b"version https://git-lfs"):
        what, fix = "a Git LFS pointer is here instead of the file", "Fetch the file itself: `git lfs pull`."
        raise FormatError(what, where=where, fix=fix) from cause
    if head.startswith((b"<!doctype html", b"<html")):
        what, fix = "an HTML page is here instead of the file", "Download it again: the page says what was missing."
        raise FormatError(what, where=where, fix=fix) from cause


_WEIGHTS = re.compile(r"(?s).*\.(safetensors|bin|pt|pth|ckpt|distcp|gguf|json)|\.metadata")
_LOOKED_AT = 1000  # maximum files whose first bytes are read after an error


def is_step(source: Source) -> bool:
    """Return True if a folder is a step of the native format, found without an import of the format."""
    return _COMMIT in source.listing


def _explanation(source: Source) -> tuple[str, str]:
    """Describe a source by its file names, and give a remedy."""
    from shardckpt.native.commit import COMMIT, MANIFEST_SUFFIX  # noqa: PLC0415  (as any other format)

    names = set(source.listing)
    if source.file is not None and source.file.endswith(".gguf"):
        return ": this looks like a GGUF file, which is written and never read", _READ_ITS_SOURCE
    for marks, what, fix in _FOREIGN:
        if names & set(marks):
            return f": this looks like {what}", fix
    if any(name.endswith(MANIFEST_SUFFIX) for name in names):
        return (
            f": this looks like the manifest of a shardckpt step without its files and {COMMIT}",
            _POINT_AT_CHECKPOINT,
        )
    return "", _POINT_AT_CHECKPOINT


def _describe_content(source: Source) -> str:
    names = sorted(source.listing)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return escape(", ".join(names[:_SHOWN]) + more)


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


@dataclass(frozen=True, slots=True)
class FormatInfo:
    """A format that can be read.

    Attributes:
        name: Short name, as in `Inspection.format`.
        title: Common name.
        looks_for: Files by which it is recognized.
        is_plugin: Whether another distribution than shardckpt provides it.
    """

    name: str
    title: str
    looks_for: str
    is_plugin: bool


@dataclass(frozen=True, slots=True, repr=False)
class FormatList(Result):
    """The formats that can be read.

    Attributes:
        formats: Formats, in the order in which they are tried.
    """

    formats: tuple[FormatInfo, ...]


def formats() -> FormatList:
    """List the formats that can be read, with those of plugins.

    Examples:
        >>> [each.name for each in shardckpt.formats().formats][:2]
        ['native', 'deepspeed-universal']
    """
    built_in = {each.name for each in BUILT_IN}
    return FormatList(
        tuple(FormatInfo(each.name, each.title, each.looks_for, each.name not in built_in) for each in iter_formats())
    )
