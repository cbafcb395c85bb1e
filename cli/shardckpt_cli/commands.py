"""Command classes that convert only the values that need conversion.

The newest typer imports pydantic, which takes 0.07 s of CPU time, to validate text and defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, get_type_hints

from typer.core import TyperCommand, TyperGroup

COMMON = ("consolidate", "merge-adapter", "inspect", "verify", "diff", "ls", "prune", "copy", "doctor")
GROUPS = ("What", "Names", "Precision", "Where", "Machine")


class _ConvertIfNeeded(NamedTuple):
    """Replaces a parameter's `process_value`: text and defaults pass unchanged."""

    parameter: Any  # option or argument
    is_text: bool
    convert: Any  # the original `process_value`

    def __call__(self, context: Any, value: Any) -> Any:
        """Return the value that is passed to the command."""
        if value is self.parameter.default and not self.parameter.required:
            return value
        return value if self.is_text and isinstance(value, str) else self.convert(context, value)


def _convert_if_needed(command: Any, context: Any) -> None:
    """Replace `process_value` for all parameters."""
    new = [each for each in command.get_params(context) if not isinstance(each.process_value, _ConvertIfNeeded)]
    hints = get_type_hints(command.callback) if new else {}
    for parameter in new:
        is_text = hints.get(parameter.name) is str
        parameter.process_value = _ConvertIfNeeded(parameter, is_text, parameter.process_value)


def _write_sections(formatter: Any, sections: Mapping[str, list[tuple[str, str]]]) -> None:
    """Write sections with two columns, empty ones left out."""
    for title, rows in sections.items():
        if rows:
            with formatter.section(title):
                formatter.write_dl(rows)


class CommandWithVerbs(TyperGroup):
    """The top-level command, whose subcommands are verbs."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the verbs: common ones first, then all others."""
        sections: dict[str, list[tuple[str, str]]] = {"Commands": [], "More commands": []}
        for name in self.list_commands(ctx):
            verb = self.get_command(ctx, name)
            if verb is not None:
                title = "Commands" if name in COMMON else "More commands"
                sections[title].append((name, verb.get_short_help_str(formatter.width)))
        _write_sections(formatter, sections)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments before the verb."""
        _convert_if_needed(self, ctx)
        return super().parse_args(ctx, args)


class Command(TyperCommand):
    """One verb."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments and options, grouped by `rich_help_panel`; options without one come last."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], **{title: [] for title in GROUPS}, "Options": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                default = "Arguments" if parameter.param_type_name == "argument" else "Options"
                sections[getattr(parameter, "rich_help_panel", None) or default].append(record)
        _write_sections(formatter, sections)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments after the verb."""
        _convert_if_needed(self, ctx)
        return super().parse_args(ctx, args)


class CommandWithTargets(Command):
    """A command whose help lists the output formats, looked up only for the help."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help text."""
        self._name_targets()
        super().format_help(ctx, formatter)

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        """Return completions for a word, with their help."""
        self._name_targets()
        return super().shell_complete(ctx, incomplete)

    def _name_targets(self) -> None:
        """Insert the output formats' names into the options' help."""
        import shardckpt

        has_ranks = any(parameter.name == "tp" for parameter in self.params)  # else vLLM's files are not written
        every, for_ranks = (shardckpt.list_targets(for_ranks=ranks, imports_plugins=False) for ranks in (False, True))
        targets = ", ".join(name for name in every if has_ranks or name != "vllm-sharded")
        rank_targets = ", ".join(for_ranks)
        for parameter in self.params:
            text = getattr(parameter, "help", None)
            if text:
                parameter.help = text.format(targets=targets, rank_targets=rank_targets)  # type: ignore[attr-defined]
