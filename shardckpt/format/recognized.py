"""Implement `formats`: list the formats that are recognized, from the registry."""

from __future__ import annotations

from dataclasses import dataclass

from shardckpt.format.registry import BUILT_IN, iter_formats


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


@dataclass(frozen=True, slots=True)
class FormatList:
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
