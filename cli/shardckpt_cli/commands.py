"""Command classes that convert only the values that need conversion.

The newest typer imports pydantic, which takes 0.07 s of CPU time, to validate text and defaults.
"""

from __future__ import annotations

from typing import Any, NamedTuple, get_type_hints

from typer.core import TyperCommand, TyperGroup


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


class CommandWithVerbs(TyperGroup):
    """The top-level command, whose subcommands are verbs."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments before the verb."""
        _convert_if_needed(self, ctx)
        return super().parse_args(ctx, args)


class Command(TyperCommand):
    """One verb."""

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
