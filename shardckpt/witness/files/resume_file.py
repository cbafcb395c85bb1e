"""Files with verdicts: `step-00001000.resumes.json` next to the step, with the resumes that were compared.

A capture may be gone when the verdict on its resume is read, and the run may not have its step. So resumes from
captures are in one more file, `.captures.resumes.json` in the run's folder.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, get_args

from shardckpt.divergence import Cause, Divergence, Since
from shardckpt.encodings.safetensors import parse_json
from shardckpt.errors import FormatError, UnsupportedError
from shardckpt.native.records import NEWER, read_fields, read_integer, read_save
from shardckpt.native.run_directory import CAPTURE_RESUMES, resumes_name
from shardckpt.storage.store import Store
from shardckpt.witness.files.record_file import line_url, read_line, write_line
from shardckpt.witness.records.resumes import MAX_RESUMES, CaptureResume, Resume, merge_capture_resumes, merge_resumes

_MAX_BYTES = 1 << 20

_VERSION = 1

_MAX_STEP = 10**18
_MAX_SECONDS = 10**12
_MAX_RANKS = 1 << 20


def read_resumes(store: Store, step: str, save: str) -> tuple[Resume, ...]:
    """Return a step's resumes, oldest first; empty if none was compared."""
    saved = _read(store, step)
    return saved.resumes if saved is not None and saved.save == save else ()


def read_removed_resumes(store: Store, step: str) -> tuple[Resume, ...]:
    """Return a removed step's resumes, by the save that wrote it last."""
    saved = _read(store, step)
    return () if saved is None else saved.resumes


def add_resumes(store: Store, step: str, save: str, *resumes: Resume) -> None:
    """Add a step's resumes to its file atomically; each replaces an earlier one with its id."""
    # A damaged file, or one of a newer version, raises and stays as it is.
    known = read_resumes(store, step, save)
    merged = merge_resumes(known, resumes)
    if merged != known:
        write_line(store, resumes_name(step), encode_resumes(SavedResumes(save, merged)))


def copy_resumes(source: Store, step: str, target: Store, name: str) -> None:
    """Add a step's resumes to its copy."""
    saved = _read(source, step)
    if saved is not None:
        add_resumes(target, name, saved.save, *saved.resumes)


def read_capture_resumes(store: Store) -> tuple[CaptureResume, ...]:
    """Return a run's resumes from tier captures, oldest first."""
    line = read_line(store, CAPTURE_RESUMES, "the file with resumes from captures", _MAX_BYTES)
    return () if line is None else decode_capture_resumes(line, where=line_url(store, CAPTURE_RESUMES))


def add_capture_resume(store: Store, resume: CaptureResume) -> None:
    """Add a resume from a capture to the run's file; it replaces an earlier one with its id."""
    known = read_capture_resumes(store)
    merged = merge_capture_resumes(known, [resume])
    if merged != known:
        write_line(store, CAPTURE_RESUMES, encode_capture_resumes(merged))


def _read(store: Store, step: str) -> SavedResumes | None:
    name = resumes_name(step)
    line = read_line(store, name, "the file with resumes", _MAX_BYTES)
    return None if line is None else decode_resumes(line, where=line_url(store, name))


@dataclass(frozen=True, slots=True)
class SavedResumes:
    """A step's resumes."""

    save: str  # id of the save that wrote the step
    resumes: tuple[Resume, ...]  # the resumes, oldest first


def encode_resumes(saved: SavedResumes) -> bytes:
    """Return resumes as JSON."""
    return _encode(asdict(saved))


def decode_resumes(data: bytes, *, where: str) -> SavedResumes:
    """Return the resumes that `encode_resumes` encoded."""
    raw = _read_list(data, "resumes", {"save": str}, where)
    return SavedResumes(read_save(raw["save"], where), tuple(_read_resume(each, where) for each in raw["resumes"]))


def encode_capture_resumes(resumes: tuple[CaptureResume, ...]) -> bytes:
    """Return resumes from captures as JSON."""
    return _encode({"captures": [asdict(each) for each in resumes]})


def decode_capture_resumes(data: bytes, *, where: str) -> tuple[CaptureResume, ...]:
    """Return the resumes that `encode_capture_resumes` encoded."""
    found = _read_list(data, "captures", {}, where)["captures"]
    return tuple(_read_capture_resume(each, where) for each in found)


def _encode(fields: dict[str, Any]) -> bytes:
    return json.dumps({"version": _VERSION, **fields}, separators=(",", ":"), allow_nan=False).encode("ascii")


def _read_list(data: bytes, name: str, others: dict[str, type], where: str) -> dict[str, Any]:
    """Return a file's fields, including a list of resumes."""
    content = parse_json(data, where=where)
    version = read_fields(content, {"version": int}, where)["version"]
    if version > _VERSION:
        raise UnsupportedError("a newer version wrote these resumes", where=where, found=version, fix=NEWER)
    raw: dict[str, Any] = read_fields(content, {name: list, **others}, where)
    if len(raw[name]) > MAX_RESUMES:
        raise _error("too many", len(raw[name]), where)
    return raw


def _read_capture_resume(value: object, where: str) -> CaptureResume:
    raw = read_fields(value, {"number": int, "tier": str, "path": str, "save": str, "resume": dict}, where)
    number = read_integer(raw["number"], "number", where, below=_MAX_STEP)
    resume = _read_resume(raw["resume"], where)
    return CaptureResume(number, raw["tier"], raw["path"], read_save(raw["save"], where), resume)


def _error(what: str, found: object, where: str) -> FormatError:
    return FormatError(f"not a file with resumes: {what}", where=where, found=found)


_KINDS: dict[str, type] = {
    "id": str,
    "began_at": float,
    "steps": list,
    "compared": int,
    "rank_count_before": int,
    "rank_count": int,
    "style_before": str,
    "style": str,
    "has_equal_layout": object,
    "is_deterministic": object,
    "divergence": object,
}


def _read_resume(value: object, where: str) -> Resume:
    raw = read_fields(value, _KINDS, where)
    if not 0 <= raw["began_at"] < _MAX_SECONDS:
        raise _error("invalid time", raw["began_at"], where)
    steps = tuple(read_integer(step, "steps", where, below=_MAX_STEP) for step in raw["steps"])
    flags = {name: raw[name] for name in ("has_equal_layout", "is_deterministic")}
    for name, flag in flags.items():
        if not (flag is None or isinstance(flag, bool)):
            raise _error(f"{name} must be true, false or null", flag, where)
    return Resume(
        read_save(raw["id"], where),
        raw["began_at"],
        steps,
        read_integer(raw["compared"], "compared", where, below=len(steps) + 1),
        read_integer(raw["rank_count_before"], "rank_count_before", where, below=_MAX_RANKS),
        read_integer(raw["rank_count"], "rank_count", where, below=_MAX_RANKS),
        raw["style_before"],
        raw["style"],
        **flags,
        divergence=None if raw["divergence"] is None else _read_divergence(raw["divergence"], where),
    )


def _read_divergence(value: object, where: str) -> Divergence:
    texts = ("cause", "name", "sentence", "fix", "since")
    raw: dict[str, Any] = read_fields(value, {"step": int, "ranks": list, **dict.fromkeys(texts, str)}, where)
    for name, allowed in (("cause", get_args(Cause)), ("since", get_args(Since))):
        if raw[name] not in allowed:
            raise _error(f"an unknown {name}", raw[name], where)
    step = read_integer(raw["step"], "step", where, below=_MAX_STEP)
    ranks = tuple(read_integer(rank, "ranks", where, below=_MAX_RANKS) for rank in raw["ranks"])
    return Divergence(raw["cause"], step, raw["name"], raw["sentence"], raw["fix"], ranks, raw["since"])
