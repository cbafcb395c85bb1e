"""The plan of a verb's work: which parts there are, which task does which, and where results are left.

A plan is JSON. It holds no code, and a task calls one of a fixed list of verbs with the arguments in it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from shardckpt.errors import FormatError, MissingFileError, ShardckptError, UnsupportedError, UsageError
from shardckpt.plan.layout.output_files import share_out
from shardckpt.storage.resolve_url import as_url, fix_folder, open_store, split, split_step_suffix
from shardckpt.storage.store import read_bytes

FORMAT = "shardckpt-plan"
VERSION = 1
MAX_PLAN_BYTES = 256 << 20
_LISTS = ("inputs", "tasks")
_FIX = "Make a new plan."


class WorkPart(NamedTuple):
    """One indivisible piece of work, such as an output file."""

    name: str  # unique in the plan
    nbytes: int  # to write, or to read


class Block(NamedTuple):
    """A task's bytes in a file with the bytes of all tasks."""

    end: int  # where the next task's start
    digest: str  # SHA-256, in hexadecimal digits


@dataclass(frozen=True, slots=True)
class TaskPlan:
    """A plan as it is stored.

    Attributes:
        id: Random text; results carry it.
        verb: Function in `shardckpt` that does the work in one process.
        arguments: Its arguments as JSON values.
        folder: Path or URL of the folder with the results of parts.
        staging: Path or URL of the folder that receives files before the commit; empty if none are written.
        unique_suffix: Suffix for names of new files, as in `Publication`.
        save_id: Id of the native step to write; empty otherwise.
        sources: Digest over names, sizes and versions of the source's files.
        tasks: Parts of each task.
        inputs: Each task's block of what it reads and writes; empty if tasks make the verb's own call.
    """

    id: str
    verb: str
    arguments: Mapping[str, Any]
    folder: str
    staging: str
    unique_suffix: str
    save_id: str
    sources: str
    tasks: tuple[tuple[WorkPart, ...], ...]
    inputs: tuple[Block, ...] = ()

    @property
    def parts(self) -> dict[str, int]:
        """Size of each part in bytes, by name."""
        return {part.name: part.nbytes for task in self.tasks for part in task}

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts.values())

    def get_task(self, number: int) -> tuple[WorkPart, ...]:
        """Return a task's parts. Raises UsageError."""
        if type(number) is not int or not 0 <= number < len(self.tasks):
            last = len(self.tasks) - 1
            expected = f"0 to {last}" if last else "0, the only task"
            raise UsageError("the number of a task must be in its plan", found=repr(number), expected=expected)
        return self.tasks[number]

    def encode(self) -> bytes:
        """Return the plan as JSON with a digest, one task a line."""
        head, lines = self._list_fields(), {}
        for name in _LISTS:
            lines[name] = ",\n".join(json.dumps(each) for each in head.pop(name))
        texts = [f'"{name}": [\n{text}\n]' for name, text in lines.items()]
        start = json.dumps({**head, "digest": self.digest()})[:-1]
        return f"{', '.join([start, *texts])}}}\n".encode()

    def digest(self) -> str:
        """Return a digest over all fields."""
        text = json.dumps(self._list_fields(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def _list_fields(self) -> dict[str, Any]:
        return {"format": FORMAT, "version": VERSION, **{each.name: getattr(self, each.name) for each in fields(self)}}


def parse_share(text: str, count: int) -> list[int]:
    """Return the tasks of a share `K/N`, the K-th of N: each N-th task. Raises UsageError."""
    share, slash, shares = str(text).partition("/")
    is_number = slash and all(each.isascii() and each.isdecimal() and len(each) < 10 for each in (share, shares))
    if not is_number or not 1 <= int(share) <= int(shares):
        raise UsageError("a share must be K/N, with K from 1 to N", found=repr(text), expected="such as 3/64")
    return list(range(int(share) - 1, count, int(shares)))


def encode_arguments(arguments: Mapping[str, object]) -> dict[str, Any]:
    """Return arguments as JSON values; local paths become absolute."""
    return {name: _encode_value(value, name) for name, value in arguments.items()}


def _encode_value(value: object, name: str) -> Any:
    if isinstance(value, (str, os.PathLike)):
        return _fix_path(os.fsdecode(value), name)
    if value is None or isinstance(value, (bool, int)) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _encode_value(each, name) for key, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
        return [_encode_value(each, name) for each in value]
    raise UsageError(f"a plan cannot store `{name}`", found=repr(value), expected="text, numbers, lists or dicts")


_WRITTEN = ("dst", "html")
_SOURCES = ("src", "a", "b", "root", "base", "adapter", "shapes_from", "config_from", "param_names", "rules")


def _fix_path(text: str, name: str) -> str:
    if name in _WRITTEN:
        return fix_folder(as_url(text)) if text else text
    run, at, suffix = text.rpartition("@") if split_step_suffix(text) else (text, "", "")
    is_path = name in _SOURCES and "://" not in run and os.path.exists(os.path.expanduser(run))
    return f"{fix_folder(as_url(run))}{at}{suffix}" if is_path else text


def list_paths(arguments: Mapping[str, Any]) -> list[str]:
    """Return the sources that arguments name: checkpoints, and files with options. Raises UsageError."""
    given = [arguments[name] for name in _SOURCES if arguments.get(name)]
    paths = [path for each in given for path in (each.values() if isinstance(each, dict) else [each])]
    found = [path for each in paths for path in (each if isinstance(each, list) else [each])]
    for path in found:
        if not isinstance(path, str):
            raise UsageError("a source in a plan must be a path or URL", found=repr(path))
    return found


def share_parts(parts: Sequence[WorkPart], count: int) -> tuple[tuple[WorkPart, ...], ...]:
    """Assign parts to at most `count` tasks, the largest first, to the least loaded one; 0 for a task a part."""
    shares = share_out(parts, min(count or len(parts), len(parts)) or 1)
    return tuple(map(tuple, shares))


def read_plan(path: str | os.PathLike[str]) -> TaskPlan:
    """Read a plan from a path or URL.

    Raises:
        FormatError: It is not a plan, or was changed.
        UnsupportedError: A newer version wrote it.
        StorageError: It cannot be read.
    """
    url = as_url(path)
    parent, name = split(url)
    store = open_store(parent)
    try:
        size = store.size(name)
    except MissingFileError as error:
        raise MissingFileError("there is no plan", where=url, fix="Name the file that --plan wrote.") from error
    if size > MAX_PLAN_BYTES:
        raise FormatError(
            "a plan must be small", where=url, found=f"{size} bytes", expected=f"at most {MAX_PLAN_BYTES}"
        )
    try:
        content = json.loads(read_bytes(store, name, 0, size))
        json.dumps(content, ensure_ascii=False).encode("utf-8", "surrogateescape")  # no path has other surrogates
        return _decode(content, url)
    except (ValueError, RecursionError) as error:
        if isinstance(error, ShardckptError):
            raise
        raise FormatError("this is not a plan: its JSON cannot be read", where=url, fix=_FIX) from error


def _decode(content: object, url: str) -> TaskPlan:
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise FormatError("this is not a plan", where=url, expected=f"JSON with format {FORMAT}", fix=_FIX)
    version = content.get("version")
    if version != VERSION:
        raise UnsupportedError(
            "a plan must have the version that this program reads",
            where=url,
            found=repr(version),
            expected=str(VERSION),
            fix=f"Run its tasks with the program that made it. {_FIX}",
        )
    texts = ("id", "verb", "folder", "staging", "unique_suffix", "save_id", "sources")
    arguments, tasks = content.get("arguments"), content.get("tasks")
    if not all(isinstance(content.get(name), str) for name in texts) or not isinstance(arguments, dict):
        raise FormatError("a plan lacks a field", where=url, expected=", ".join((*texts, "arguments")), fix=_FIX)
    plan = TaskPlan(
        **{name: content[name] for name in texts},
        arguments=arguments,
        tasks=_decode_tasks(tasks, url),
        inputs=_decode_blocks(content.get("inputs"), url),
    )
    if plan.digest() != content.get("digest"):
        raise FormatError("this plan was changed after it was made", where=url, found="another digest", fix=_FIX)
    if len(plan.parts) < sum(map(len, plan.tasks)):
        raise FormatError("a part is in two tasks", where=url, fix=_FIX)
    if len(plan.inputs) not in (0, len(plan.tasks)):
        raise FormatError("a plan must have inputs of each task, or of none", where=url, fix=_FIX)
    return plan


def _decode_tasks(tasks: object, url: str) -> tuple[tuple[WorkPart, ...], ...]:
    is_list = isinstance(tasks, list) and all(isinstance(task, list) for task in tasks)
    parts = [part for task in tasks for part in task] if isinstance(tasks, list) and is_list else [None]
    if not all(map(_is_part, parts)) or not isinstance(tasks, list):
        raise FormatError("a plan's tasks must be lists of [name, bytes]", where=url, fix=_FIX)
    return tuple(tuple(WorkPart(*part) for part in task) for task in tasks)


def _decode_blocks(blocks: object, url: str) -> tuple[Block, ...]:
    found = [Block(*block) for block in blocks if _is_block(block)] if isinstance(blocks, list) else []
    ends = [0, *(block.end for block in found)]
    if not isinstance(blocks, list) or len(found) < len(blocks) or ends != sorted(ends):
        raise FormatError("a plan's inputs must be lists of [end, digest] in order", where=url, fix=_FIX)
    return tuple(found)


def _is_block(block: object) -> bool:
    match block:
        case [int(end), str()]:
            return type(end) is int and end <= MAX_PLAN_BYTES
    return False


def _is_part(part: object) -> bool:
    match part:
        case [str(), int(nbytes)]:
            return type(nbytes) is int and nbytes >= 0
    return False
