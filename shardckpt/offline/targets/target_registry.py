"""Registry for output formats.

To add one, write a module in this folder and add a line to `BUILT_IN`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from difflib import get_close_matches
from importlib import import_module
from typing import NamedTuple, ParamSpec, TypeVar

from shardckpt.errors import UsageError
from shardckpt.offline.targets.base import PlannedRanks, Target
from shardckpt.offline.write.conversion import Layout, PlannedFiles
from shardckpt.offline.write.stream import FileSink, OutputFile, TensorStream
from shardckpt.plugins import Plugin, find_plugins, guard_call, load_plugin, name_plugin, warn_of_plugin

_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")
_PLAN, _WRITE, _HOLD = "plan its files", "write its files", "say what it can hold"

# Modules are imported on demand. The first target is the default.
BUILT_IN = {
    "safetensors": "shardckpt.offline.targets.safetensors_files",
    "torch": "shardckpt.offline.targets.torchsave",
    "dcp": "shardckpt.offline.targets.dcp",
    "native": "shardckpt.offline.targets.native",
    "deepspeed-universal": "shardckpt.offline.targets.deepspeed_universal",
    "gguf": "shardckpt.offline.targets.gguf.target",
    "vllm-sharded": "shardckpt.offline.targets.vllm_sharded",
}

DEFAULT = next(iter(BUILT_IN))


def load_target(name: str) -> Target:
    """Return a built-in target."""
    target: Target = import_module(BUILT_IN[name]).TARGET
    return target


def load_targets() -> tuple[Target, ...]:
    """Return all built-in targets."""
    return tuple(map(load_target, BUILT_IN))


def list_targets(*, for_ranks: bool = False, imports_plugins: bool = True) -> tuple[str, ...]:
    """Return the names of output formats; installed plugins come last.

    Args:
        for_ranks: Whether to return formats for `reshard` instead of `consolidate`, `convert` and `merge_adapter`.
        imports_plugins: Whether to import plugins to see if `reshard` supports them; otherwise all are listed.

    Examples:
        >>> shardckpt.list_targets()
        ('safetensors', 'torch', 'dcp', 'native', 'deepspeed-universal', 'gguf', 'vllm-sharded')
    """
    built_in = [target.name for target in load_targets() if target.plan_ranks] if for_ranks else [*BUILT_IN]
    if for_ranks and imports_plugins:
        return (*built_in, *(target.name for target in _load_plugins() if target.plan_ranks))
    return (*built_in, *(plugin.name for plugin in _find_plugins()))


def find_target(name: str, where: str = "") -> Target:
    """Return a target by its name; a plugin is loaded if no built-in target has it."""
    if name in BUILT_IN:
        return load_target(name)
    for plugin in _find_plugins():
        if plugin.name == name:
            return _Guard(plugin, where).target(load_plugin(plugin, Target))
    raise UsageError("--to must be a format that can be written", found=name, expected=", ".join(list_targets()))


def _find_plugins() -> tuple[Plugin, ...]:
    return find_plugins(("shardckpt.targets",), tuple(BUILT_IN))


def _load_plugins(on_error: Callable[[str], None] = lambda _: None) -> Iterator[Target]:
    """Yield the targets in plugins; pass loading errors to `on_error`."""
    for plugin in _find_plugins():
        try:
            yield load_plugin(plugin, Target)
        except UsageError as error:  # raised when the target is used
            on_error(str(error))


class _Guard(NamedTuple):
    """Adds a plugin's name to errors from its target, plan and files."""

    plugin: Plugin
    where: str

    def call(self, function: Callable[_Params, _Result], action: str) -> Callable[_Params, _Result]:
        return guard_call(function, self.plugin, action, self.where, UsageError)

    def target(self, target: Target) -> Target:
        plan_ranks = target.plan_ranks and self.call(target.plan_ranks, _PLAN)
        return replace(
            target,
            check=self.call(target.check, "check the options"),
            holds_dtype=self.call(target.holds_dtype, _HOLD),
            holds_value=self.call(target.holds_value, _HOLD),
            plan=self.call(lambda conversion: self.files(target.plan(conversion)), _PLAN),
            plan_ranks=plan_ranks and (lambda reader, options: self.ranks(plan_ranks(reader, options))),
        )

    def ranks(self, ranks: PlannedRanks) -> PlannedRanks:
        return replace(ranks, files=self.files(ranks.files))

    def files(self, files: PlannedFiles) -> PlannedFiles:
        return replace(
            files,
            plan_layout=self.call(lambda *names: self.layout(files.plan_layout(*names)), _PLAN),
            find_kept=self.call(files.find_kept, _PLAN),
        )

    def layout(self, layout: Layout) -> Layout:
        ending = layout.ending and replace(layout.ending, made=self.call(layout.ending.made, _WRITE))
        return replace(layout, payload=tuple(map(self.file, layout.payload)), ending=ending)

    def file(self, file: OutputFile) -> OutputFile:
        def encode(stream: TensorStream, writer: FileSink) -> bytes:
            with name_plugin(self.plugin, _WRITE, self.where, UsageError, passes=stream.is_from_caller):
                return file.encode(stream, writer)

        return replace(file, encode=encode)


def find_rank_target(name: str, where: str = "") -> Target:
    """Return a target that `reshard` supports, by its name."""
    target = find_target(name, where) if name in list_targets() else None
    if target is None or target.plan_ranks is None:
        names = ", ".join(list_targets(for_ranks=True))
        raise UsageError("--to must be a format that reshard writes", found=name, expected=names)
    return target


def choose_target(name: str, path: str) -> Target:
    """Return a conversion's target, by its name or by the path's suffix."""
    if not name:
        by_suffix = _find_by_suffix(path) or _find_plugin_by_suffix(path)
        return by_suffix or _require_folder(path, load_target(DEFAULT))
    target = find_target(name, path)
    if path.endswith(target.suffixes):
        return target
    by_suffix = _find_by_suffix(path)
    if by_suffix is None:
        return _require_folder(path, target)
    if not target.suffixes:
        raise UsageError(f"{target.title} is a folder", found=path, fix="Name a folder.")
    raise UsageError(
        f"--to {name} does not write such a file", found=path, expected=f"--to {by_suffix.name}, or a folder"
    )


def _require_folder(path: str, target: Target) -> Target:
    """Return the target for a folder's path; reject a path with nearly a file's suffix."""
    _, dot, suffix = path.rpartition("/")[2].rpartition(".")
    meant = get_close_matches(f".{suffix}", _SUFFIXES, 1, _ALIKE) if dot else []
    if meant:
        raise UsageError(
            "this name could be a file or a folder",
            where=path,
            expected=f"a file that ends with {meant[0]}",
            fix="For a folder of this name, write a slash at its end.",
        )
    return target


_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".gguf")
_ALIKE = 0.8


def _find_by_suffix(path: str) -> Target | None:
    """Return the built-in target that writes the path's suffix; later ones are not imported."""
    targets = map(load_target, BUILT_IN) if _has_suffix(path) else ()
    return next((target for target in targets if path.endswith(target.suffixes)), None)


def _has_suffix(path: str) -> bool:
    return "." in path.rpartition("/")[2]


def _find_plugin_by_suffix(path: str) -> Target | None:
    if not _has_suffix(path):
        return None
    target = next((each for each in _load_plugins(warn_of_plugin) if path.endswith(each.suffixes)), None)
    return target and find_target(target.name, path)
