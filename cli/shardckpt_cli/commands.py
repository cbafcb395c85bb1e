"""Classes of commands that convert only the values that need it.

The newest typer imports pydantic, 0.07 s of processor time, to check that text is text and that a default is valid.
"""

from __future__ import annotations

from typing import Any, NamedTuple, get_type_hints

from typer.core import TyperCommand, TyperGroup


class _ConvertIfNeeded(NamedTuple):
    """Takes the place of a parameter's `process_value`: text and defaults pass as they are.

    Attributes:
        parameter: The option or argument.
        is_text: Whether its values are text.
        convert: Its own `process_value`.
    """

    parameter: Any
    is_text: bool
    convert: Any

    def __call__(self, context: Any, value: Any) -> Any:
        """Return the value that the command is given."""
        if value is self.parameter.default and not self.parameter.required:
            return value
        return value if self.is_text and isinstance(value, str) else self.convert(context, value)


def _convert_if_needed(command: Any, context: Any) -> None:
    """Change the parameters of a command."""
    hints = get_type_hints(command.callback)
    for parameter in command.get_params(context):
        if not isinstance(parameter.process_value, _ConvertIfNeeded):
            is_text = hints.get(parameter.name) is str
            parameter.process_value = _ConvertIfNeeded(parameter, is_text, parameter.process_value)


class CommandWithVerbs(TyperGroup):
    """The command that has verbs."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words before the verb."""
        _convert_if_needed(self, ctx)
        return super().parse_args(ctx, args)


class Command(TyperCommand):
    """One verb."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words behind the verb."""
        _convert_if_needed(self, ctx)
        return super().parse_args(ctx, args)


class CommandWithTargets(Command):
    """A command whose help lists the formats that can be written; they are looked up only for the help."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help."""
        import shardckpt

        targets, rank_targets = (
            ", ".join(shardckpt.list_targets(for_ranks=ranks, imports_plugins=False)) for ranks in (False, True)
        )
        for parameter in self.params:
            text = getattr(parameter, "help", None)
            if text:
                parameter.help = text.format(targets=targets, rank_targets=rank_targets)  # type: ignore[attr-defined]
        super().format_help(ctx, formatter)
