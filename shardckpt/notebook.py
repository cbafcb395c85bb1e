"""How results look: a few lines as text; tables or a page in a notebook."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from datetime import datetime, timezone
from html import escape as escape_html
from itertools import islice
from typing import Any, TypeVar

from shardckpt.errors import escape

__all__ = ["Result", "draw_in_notebooks"]

_MAX_LINES, _MAX_WIDTH = 12, 160
_NOTHING: tuple[object, ...] = (None, "", ())  # is not shown
_MAX_ROWS, _MAX_CELL = 100, 200
# A frame has an origin of its own: the script of a page cannot reach the notebook.
_FRAME = 'sandbox="allow-scripts" style="width: 100%; height: 640px; border: 0; resize: vertical; overflow: auto"'
_MAX_BYTES = 1_000_000  # a notebook stores each output in its file

R = TypeVar("R", bound="Result")

_pages: dict[type[Result], Callable[[Any], str]] = {}


class Result:
    """Base class of the dataclasses that public functions return; they have `repr=False`."""

    __slots__ = ()

    def __repr__(self) -> str:
        lines, containers = [_describe_scalars(self)], _list_containers(self)
        room = max(_MAX_LINES - 1 - len(containers), 0)  # lines for items after the first ones
        for name, value in containers:
            items = value.items() if isinstance(value, Mapping) else value
            shown = [*islice(items, room + 1 if _has_fields(next(iter(items))) else 1)]
            texts = (_describe_scalars(item) if isinstance(item, Result) else repr(item) for item in shown)
            start = f"  {name} ({len(value):,}): "
            lines += [
                f"{' ' * 4 if at else start}{_shorten(t, _MAX_WIDTH - len(start) - 9)}" for at, t in enumerate(texts)
            ]
            lines[-1] += ", ..." if len(shown) < len(value) else ""
            room -= len(shown) - 1
        return "\n".join(_shorten(line, _MAX_WIDTH) for line in lines[:_MAX_LINES])

    def _repr_html_(self) -> str:
        """Return the page of this result in a frame, else its tables; text if a notebook shows neither."""
        head = f"<pre>{_escape(_describe_scalars(self))}</pre>"
        draw = _pages.get(type(self))
        page = "" if draw is None else draw(self)
        if page and len(page) <= _MAX_BYTES:
            return f'{head}<iframe title="{type(self).__name__}" {_FRAME} srcdoc="{_quote(page)}"></iframe>'
        note = "<p>The page is too large for a notebook: write it with <code>html=</code>.</p>" if page else ""
        return head + note + "".join(_make_table(name, value) for name, value in _list_containers(self))


def draw_in_notebooks(result: type[R], render: Callable[[R], str]) -> None:
    """Show results of a class as the page that `render` returns."""
    _pages[result] = render


def _list_fields(found: Any) -> list[tuple[str, Any]]:
    names = [field.name for field in fields(found)] if is_dataclass(found) else found._fields
    return [(name, getattr(found, name)) for name in names]


def _has_fields(item: object) -> bool:
    return is_dataclass(item) or hasattr(item, "_fields")


def _is_container(value: object) -> bool:
    return isinstance(value, (Mapping, tuple)) and not hasattr(value, "_fields")


def _list_containers(found: Any) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in _list_fields(found) if _is_container(value) and value]


def _describe_scalars(found: Result) -> str:
    """Return a result without its lists on one line."""
    named = [("ok", found.ok)] if hasattr(found, "ok") else []
    named += [(name, value) for name, value in _list_fields(found) if not (_is_container(value) or value in _NOTHING)]
    text = ", ".join(f"{name}={_shorten(repr(value), _MAX_CELL)}" for name, value in named)
    return f"{type(found).__name__}({text})"


def _shorten(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def _escape(value: object) -> str:
    return escape_html(_shorten(escape(value), _MAX_CELL))


def _quote(page: str) -> str:
    return page.replace("&", "&amp;").replace('"', "&quot;")


def _make_table(title: str, rows: Mapping[Any, Any] | tuple[Any, ...]) -> str:
    """Return the first rows of a field as a table."""
    head, cells = _list_cells(title, rows)
    kept = [at for at in range(len(head)) if any(row[at] not in _NOTHING for row in cells)]
    left = len(rows) - len(cells)
    lines = [
        f"<details open><summary>{_escape(title.replace('_', ' '))} ({len(rows):,})</summary>",
        '<div style="max-height: 320px; overflow: auto"><table><thead><tr>',
        *(f"<th>{_escape(head[at].replace('_', ' '))}</th>" for at in kept),
        "</tr></thead><tbody>",
        *(f"<tr>{''.join(f'<td>{_escape(_to_text(head[at], row[at]))}</td>' for at in kept)}</tr>" for row in cells),
        f"</tbody></table></div>{f'<p>{left:,} more</p>' if left else ''}</details>",
    ]
    return "".join(lines)


def _list_cells(title: str, rows: Mapping[Any, Any] | tuple[Any, ...]) -> tuple[list[str], list[list[Any]]]:
    """Return the names and the first values of a table; its columns are the fields of its items."""
    if isinstance(rows, Mapping):
        return ["name", "value"], [[*pair] for pair in islice(rows.items(), _MAX_ROWS)]
    items = rows[:_MAX_ROWS]
    if not _has_fields(items[0]):
        return [title], [[item] for item in items]
    return [name for name, _ in _list_fields(items[0])], [[value for _, value in _list_fields(each)] for each in items]


def _to_text(name: str, value: object) -> str:
    """Return the text of a cell: times by their date, long lists by their number of items."""
    if value in _NOTHING:
        return ""
    if isinstance(value, float) and name.endswith("_at"):
        with suppress(OverflowError, ValueError, OSError):  # a number from a file may be no time
            return datetime.fromtimestamp(value, timezone.utc).isoformat(" ", "seconds")
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, (Mapping, tuple)) and len(value) > 4:
        return f"{len(value):,} items"
    return str(value)
