"""Formats and targets from other distributions, found by entry point."""

from __future__ import annotations

import os
import site
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import NamedTuple, ParamSpec, TypeVar

from shardckpt.errors import ShardckptError, UsageError, describe_with_class, escape

_Kind = TypeVar("_Kind")
_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")


class Plugin(NamedTuple):
    """An entry point that is not loaded yet."""

    name: str  # entry point name, which is the format's or target's name
    group: str  # such as `shardckpt.formats`
    distribution: str  # name and version of the distribution that installs it
    load: Callable[[], object]  # imports the plugin

    def __str__(self) -> str:
        return f"{self.name!r} of {self.distribution}"


def find_plugins(groups: tuple[str, ...], built_in: tuple[str, ...]) -> tuple[Plugin, ...]:
    """Return installed entry points in some groups, by name; clashing names are ignored, with a warning."""
    return _find_plugins(groups, built_in, find_installed())


def find_installed() -> tuple[str, ...]:
    """Return the `sys.path` folders whose distributions are installed."""
    # Python itself runs code from these folders as it starts: package folders, folders that their `.pth` files name,
    # and absolute ones in `PYTHONPATH`. The working directory and a script's folder do not count: they may be a
    # checkpoint's folder.
    named = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    installed = {os.path.realpath(each) for each in named if os.path.isabs(each)}
    with suppress(OSError):  # the working directory was removed
        installed.discard(os.getcwd())
    installed |= _find_site_folders()
    return tuple(each for each in sys.path if os.path.isabs(each) and os.path.realpath(each) in installed)


@cache
def _find_site_folders() -> frozenset[str]:
    """Return the folders for installed packages, and the folders that their `.pth` files name."""
    folders = [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]
    for folder in tuple(folders):
        with suppress(OSError):  # as Python itself
            for name in os.listdir(folder):
                if name.endswith(".pth"):
                    folders += _read_folders(folder, name)
    return frozenset(map(os.path.realpath, folders))


def _read_folders(folder: str, name: str) -> list[str]:
    """Return the folders that a `.pth` file names; none if it cannot be read."""
    found: list[str] = []
    with suppress(OSError), open(os.path.join(folder, name), encoding="utf-8-sig", errors="surrogateescape") as lines:
        found += (os.path.join(folder, line.rstrip()) for line in lines)
    return found


@cache
def _find_plugins(groups: tuple[str, ...], built_in: tuple[str, ...], path: tuple[str, ...]) -> tuple[Plugin, ...]:
    if not _has_entry_points(groups, path):
        return ()
    from importlib.metadata import distributions  # noqa: PLC0415  (0.03 s, which most commands can do without)

    plugins: dict[str, list[Plugin]] = {}
    seen = set()
    for each in distributions(path=[*path]):
        try:
            points = [point for point in each.entry_points if point.group in groups]
        except Exception as error:  # noqa: BLE001  (a file that cannot be parsed raises whatever it raises)
            warn_of_plugin(f"no plugin of {each.name} is used: its entry_points.txt cannot be read: {error}")
            continue
        if points and each.name not in seen:  # one distribution may be installed in two folders
            seen.add(each.name)
            for point in points:
                owner = f"{each.name} {each.version}"
                plugins.setdefault(point.name, []).append(Plugin(point.name, point.group, owner, point.load))
    for name, rivals in plugins.items():
        owners = [*(["shardckpt"] if name in built_in else []), *(each.distribution for each in rivals)]
        if len(owners) > 1:
            warn_of_plugin(f"the name {name!r} is used by {' and by '.join(owners)}: no plugin of this name is used")
    return tuple(
        rivals[0] for name, rivals in sorted(plugins.items()) if len(rivals) == 1 and rivals[0].name not in built_in
    )


def _has_entry_points(groups: tuple[str, ...], path: tuple[str, ...]) -> bool:
    """Return True if a distribution on a path may have entry points in a group. Takes 1 ms."""
    sections = [f"[{group}]".encode() for group in groups]
    for folder in path:
        try:
            names = os.listdir(folder)
        except NotADirectoryError:
            return True  # an archive, which `importlib.metadata` can read
        except OSError:
            continue
        for name in names:
            if name.endswith((".dist-info", ".egg-info")):
                try:
                    with open(f"{folder}/{name}/entry_points.txt", "rb") as file:
                        text = file.read()
                        if any(section in text for section in sections):
                            return True
                except OSError:
                    continue
    return False


def load_plugin(plugin: Plugin, kind: type[_Kind]) -> _Kind:
    """Import a plugin, which must be a `kind` with the entry point's name."""
    fix = "Update or uninstall that distribution."
    try:
        value = plugin.load()
    except (Exception, SystemExit) as error:
        what = f"the plugin {plugin} cannot be imported"
        raise UsageError(what, found=describe_with_class(error), fix=fix) from error
    if not isinstance(value, kind):
        raise UsageError(f"the plugin {plugin} must be a {kind.__name__}", found=type(value).__name__, fix=fix)
    name = getattr(value, "name", None)
    if name != plugin.name:
        raise UsageError(f"the plugin {plugin} must have its entry point's name", found=repr(name), fix=fix)
    return value


@contextmanager
def name_plugin(
    plugin: Plugin,
    action: str,
    where: str,
    error_type: type[ShardckptError],
    passes: Callable[[BaseException], bool] = lambda _: False,
) -> Iterator[None]:
    """Raise a plugin's exceptions as an error that names it; errors from shardckpt pass unchanged."""
    try:
        # Other exceptions that `passes` accepts were not caused by the plugin: they pass unchanged too.
        yield
    except (ShardckptError, MemoryError):
        raise
    except (Exception, SystemExit) as error:
        if passes(error):
            raise
        what = f"the plugin {plugin} failed to {action}"
        raise error_type(what, where=where, found=describe_with_class(error)) from error


def guard_call(
    function: Callable[_Params, _Result], plugin: Plugin, action: str, where: str, error_type: type[ShardckptError]
) -> Callable[_Params, _Result]:
    """Wrap a plugin's function so that it raises errors like `name_plugin`."""

    def call(*args: _Params.args, **kwargs: _Params.kwargs) -> _Result:
        with name_plugin(plugin, action, where, error_type):
            return function(*args, **kwargs)

    return call


def warn_of_plugin(message: str) -> None:
    """Warn about a plugin. The caller continues without it."""
    warnings.warn(escape(message), RuntimeWarning, stacklevel=2)
