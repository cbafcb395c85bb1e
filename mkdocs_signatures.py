"""Show the keyword arguments of `**options: Unpack[Params]` one by one in the API pages, as type checkers do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import griffe


class SpelledKeywords(griffe.Extension):
    """Replaces `**options` by the keys of its TypedDict, if the docstring describes these and not `**options`."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:  # noqa: ARG002
        """Rewrite the signatures of a package that has been read."""
        for function in _find_functions(pkg):
            for parameter in list(function.parameters):
                params = _find_params(parameter)
                if params and f"**{parameter.name}:" not in _docstring(function):
                    _spell_out(function, parameter.name, pkg.modules_collection[params])


def _find_functions(parent: griffe.Module | griffe.Class) -> Iterator[griffe.Function]:
    for member in parent.members.values():
        if isinstance(member, griffe.Function):
            yield member
        elif isinstance(member, griffe.Module | griffe.Class):
            yield from _find_functions(member)


def _find_params(parameter: griffe.Parameter) -> str | None:
    """Return the path of the TypedDict that a parameter unpacks, or None."""
    annotation = parameter.annotation
    if isinstance(annotation, griffe.ExprSubscript) and annotation.canonical_name == "Unpack":
        return str(annotation.slice.canonical_path)
    return None


def _docstring(function: griffe.Function) -> str:
    documented = function.parent if function.name == "__init__" else function
    return documented.docstring.value if documented and documented.docstring else ""


def _spell_out(function: griffe.Function, name: str, params: griffe.Object | griffe.Alias) -> None:
    del function.parameters[name]
    for key, attribute in params.attributes.items():
        keyword = griffe.Parameter(
            key, annotation=attribute.annotation, kind=griffe.ParameterKind.keyword_only, default="..."
        )
        function.parameters.add(keyword)
