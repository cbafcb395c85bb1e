"""From a path or URL to an open checkpoint: every registered format is asked, structure first, name second."""

from __future__ import annotations

from shardckpt.errors import SourceNotFoundError, StorageError, UnknownFormatError, UsageError, escape
from shardckpt.format import (
    accelerate,
    composer,
    dcp,
    deepspeed,
    hf,
    lightning,
    megatron,
    native,
    torch_checkpointing,
    torch_file,
    torch_folder,
    universal,
)
from shardckpt.format.native_commit import COMMIT, MANIFEST_SUFFIX
from shardckpt.format.native_references import NamedBases
from shardckpt.format.reader import Evidence, Format, Reader, Source
from shardckpt.storage.open_store import kind, open_store, split
from shardckpt.storage.within import Within

FORMATS: tuple[Format, ...] = (
    native.FORMAT,
    universal.FORMAT,
    deepspeed.FORMAT,
    accelerate.FORMAT,
    composer.FORMAT,
    torch_checkpointing.FORMAT,
    lightning.FORMAT,
    megatron.FORMAT,
    dcp.FORMAT,
    hf.FORMAT,
    torch_folder.HF_FORMAT,
    torch_folder.LOOSE_FORMAT,
    torch_file.FORMAT,
)
"""Every format that can be read. Those that contain others stand before them."""

_HOLDER = "Point at the folder or file that holds the checkpoint."
_FOREIGN = (
    (
        ("_CHECKPOINT_METADATA", "manifest.ocdbt", "_METADATA", "_sharding"),
        "an Orbax (JAX) folder, which needs TensorStore to read",
        "Restore it in JAX and write its arrays with safetensors.flax.save_file.",
    ),
    (
        ("latest_checkpointed_iteration.txt",),
        "a Megatron folder of several iterations",
        "Point at one iter_*.",
    ),
    (
        ("mp_rank_00", "mp_rank_00_000"),
        "an iteration of Megatron's older format, cut by tensor parallelism as only its code knows",
        "Convert it with Megatron's tools/checkpoint/convert.py, or save it with --ckpt-format torch_dist.",
    ),
    (
        ("latest", "zero_to_fp32.py"),
        "a DeepSpeed folder without the folder of state files that `latest` names",
        "Copy that folder beside it.",
    ),
    (("checkpoint-1", "trainer_state.json"), "a folder of a transformers Trainer without model files", _HOLDER),
    (("COMMIT",), "a shardckpt step without its manifest and its files", _HOLDER),
)
"""Names that tell what a folder is, what that is, and what to do with it."""

_SHOWN = 8
_LOOKED_INTO = 8
"""Folders of a folder that are looked into where it is no checkpoint itself: the last ones, by name."""


def open_source(url: str, bases: NamedBases = "") -> Source:
    """Return what lies at a path or URL, unopened.

    Args:
        url: The path or URL.
        bases: Folders that the caller names of those that a step refers to.

    Raises:
        SourceNotFoundError: Nothing lies there.
        UsageError: No filesystem for the URL's protocol.
        StorageError: The store failed.
    """
    found = kind(url)
    if found == "missing":
        raise SourceNotFoundError("nothing lies here", where=url, fix="Check the path or URL.")
    if found == "file":
        parent, name = split(url)
        return Source(open_store(parent), name, bases)
    return Source(open_store(url), bases=bases)


def detect(source: Source) -> Format:
    """Return the format of a source.

    Raises:
        UnknownFormatError: No reader recognises it; the message lists what was found and what was looked for.
        UsageError: Bases are named, and checkpoints of its format have none.
    """
    found = _recognised(source)
    if source.bases and found is not native.FORMAT:
        raise UsageError("this checkpoint has no base", where=source.url, found=found.title)
    return found


def _recognised(source: Source) -> Format:
    form = _asked(source)
    if form is not None:
        return form
    if not source.listing:
        raise UnknownFormatError("this folder is empty", where=source.url)
    what, fix = _explanation(source)
    raise (_around(source) if fix == _HOLDER else None) or _unknown(source, what, fix)


def _asked(source: Source) -> Format | None:
    """Return the format that takes a source for its own, by structure if any does; None where none does."""
    named: Format | None = None
    for candidate in FORMATS:
        evidence = candidate.recognise(source)
        if evidence is Evidence.STRUCTURE:
            return candidate
        if evidence is Evidence.NAME and named is None:
            named = candidate
    return named


def _around(source: Source) -> UnknownFormatError | None:
    """Return what to say where a checkpoint lies one level above or below; None where none does."""
    if source.file is not None:
        form = _asked_nearby(Source(source.store))
        if form is None:
            return None
        return UnknownFormatError(
            "this file is no checkpoint by itself, and the folder that holds it is one",
            where=source.url,
            found=f"{source.store.url} ({form.name})",
            fix="Point at that folder.",
        )
    names = [name for name in source.folders if not name.startswith(".")][-_LOOKED_INTO:]
    below = [(name, _asked_nearby(Source(Within(source.store, name)))) for name in names]
    found = ", ".join(f"{name} ({form.name})" for name, form in below if form is not None)
    if not found:
        return None
    return UnknownFormatError(
        "this folder is no checkpoint itself, and holds some",
        where=source.url,
        found=found,
        fix="Point at one of them.",
    )


def _asked_nearby(source: Source) -> Format | None:
    """Return the format of a place that nobody pointed at: where it cannot be looked at, it is none."""
    try:
        return _asked(source)
    except StorageError:
        return None


def checkpoint_in(url: str) -> str:
    """Say which checkpoint a folder is, holds, or looks like; empty where it is none and nobody knows of one in it.

    Args:
        url: Path or URL of the folder; need not exist.

    Raises:
        StorageError: The store failed.
    """
    if kind(url) != "folder":
        return ""
    source = open_source(url)
    form = _asked_nearby(source)
    if form is not None:
        return f"a checkpoint ({form.title})"
    what, _ = _explanation(source)
    if what:
        return what.removeprefix(": this looks like ")
    around = _around(source)
    return str(around.found) if around is not None else ""


def _unknown(source: Source, what: str, fix: str) -> UnknownFormatError:
    looked_for = "one of: " + "; ".join(f.looks_for for f in FORMATS)
    return UnknownFormatError(
        f"no reader recognises this{what}",
        where=source.url,
        found=_found(source),
        expected=looked_for if fix == _HOLDER else "",
        fix=fix,
    )


def open_checkpoint(url: str, bases: NamedBases = "") -> Reader:
    """Open the checkpoint at a path or URL, whatever its format.

    Args:
        url: The path or URL.
        bases: Folders that the caller names of those that a step refers to.

    Raises:
        SourceNotFoundError: Nothing lies there.
        UnknownFormatError: No reader recognises it.
        CheckpointError: It is recognised and cannot be read.
        StorageError: The store failed.
    """
    source = open_source(url, bases)
    return detect(source).open(source)


def _explanation(source: Source) -> tuple[str, str]:
    """Return what a source looks like, where names tell, and what to do."""
    names = set(source.listing)
    for marks, what, fix in _FOREIGN:
        if names & set(marks):
            return f": this looks like {what}", fix
    if any(name.endswith(MANIFEST_SUFFIX) for name in names):
        return f": this looks like the manifest of a shardckpt step without its files and {COMMIT}", _HOLDER
    return "", _HOLDER


def _found(source: Source) -> str:
    names = sorted(source.listing)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return escape(", ".join(names[:_SHOWN]) + more)
