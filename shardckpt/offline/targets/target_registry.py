"""Every format that can be written. Adding one is a module beside this one and a line in `TARGETS`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from shardckpt.errors import UsageError
from shardckpt.offline.targets import dcp, deepspeed_universal, native, safetensors_files, torchsave
from shardckpt.offline.targets.base import Conversion, Target
from shardckpt.offline.write.conversion import Layout, PlannedFiles
from shardckpt.plugins import Plugin, find_plugins, load_plugin, name_plugin

TARGETS: tuple[Target, ...] = (
    safetensors_files.TARGET,
    torchsave.TARGET,
    dcp.TARGET,
    native.TARGET,
    deepspeed_universal.TARGET,
)
"""The built-in targets; the first one is written if nothing else is asked for."""


def list_targets(*, for_ranks: bool = False) -> tuple[str, ...]:
    """Return the names of the formats that can be written, those of installed plugins last.

    Args:
        for_ranks: Return those of `reshard`. The others are those of `consolidate`, `convert` and `merge_adapter`.

    Example:
        >>> shardckpt.list_targets()
        ('safetensors', 'torch', 'dcp', 'native', 'deepspeed-universal')
    """
    if not for_ranks:
        return (*(target.name for target in TARGETS), *(plugin.name for plugin in _find_plugins()))
    targets = list(TARGETS)
    for plugin in _find_plugins():
        with suppress(UsageError):  # raised if somebody asks for it
            targets.append(load_plugin(plugin, Target))
    return tuple(target.name for target in targets if target.plan_ranks)


def find_target(name: str) -> Target:
    """Return a target by its name; a plugin is loaded if no built-in target has it.

    Raises:
        UsageError: There is none of this name, or its plugin is broken.
    """
    for target in TARGETS:
        if target.name == name:
            return target
    for plugin in _find_plugins():
        if plugin.name == name:
            target = load_plugin(plugin, Target)
            return replace(target, plan=_name_in_errors(target.plan, plugin))
    raise UsageError("--to must be a format that can be written", found=name, expected=", ".join(list_targets()))


def _find_plugins() -> tuple[Plugin, ...]:
    return find_plugins(("shardckpt.targets",), tuple(target.name for target in TARGETS))


def _name_in_errors(plan: Callable[[Conversion], PlannedFiles], plugin: Plugin) -> Callable[[Conversion], PlannedFiles]:
    """Return the plan of a plugin; errors of the plugin in it and in its layout name the plugin."""

    def plan_named(conversion: Conversion) -> PlannedFiles:
        def plan_layout(unique_suffix: str, save_id: str) -> Layout:
            with name_plugin(plugin, "plan its files", conversion.target, UsageError):
                return files.plan_layout(unique_suffix, save_id)

        with name_plugin(plugin, "plan its files", conversion.target, UsageError):
            files = plan(conversion)
            return replace(files, plan_layout=plan_layout)

    return plan_named


def find_rank_target(name: str) -> Target:
    """Return a target that `reshard` writes, by its name.

    Raises:
        UsageError: There is none of this name, or it cannot be split for a number of ranks.
    """
    target = find_target(name) if name in list_targets() else None
    if target is None or target.plan_ranks is None:
        names = ", ".join(list_targets(for_ranks=True))
        raise UsageError("--to must be a format that reshard writes", found=name, expected=names)
    return target


def choose_target(name: str, path: str) -> Target:
    """Return the target of a conversion, by the name that was asked for and the suffix of the path.

    Raises:
        UsageError: The target is unknown, or does not write such a file.
    """
    by_suffix = next((target for target in TARGETS if path.endswith(target.suffixes)), None)
    if not name:
        return by_suffix or TARGETS[0]
    target = find_target(name)
    if by_suffix is None or path.endswith(target.suffixes):
        return target
    if not target.suffixes:
        raise UsageError(f"{target.title} is a folder", found=path, fix="Name a folder.")
    raise UsageError(
        f"--to {name} does not write such a file", found=path, expected=f"--to {by_suffix.name}, or a folder"
    )
