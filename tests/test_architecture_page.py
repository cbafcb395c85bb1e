"""docs/architecture.md draws the packages as the sources are: layers, purposes, and who imports whom.

`UPDATE_DOCS=1 pytest tests/test_architecture_page.py` writes the drawing into the page.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "architecture.md"
START, END = "<!-- drawing: tests/test_architecture_page.py -->\n", "<!-- end of drawing -->\n"
ORDER = (
    "testing",
    "integrations",
    "data",
    "tiers",
    "witness",
    "checkpoint",
    "offline",
    "state",
    "readers",
    "native",
    "encodings",
    "plan",
    "storage",
    "core",
    "shared_store",
    "events",
)


def load_tables() -> ModuleType:
    """Return `test_architecture`, whose tables are what the drawing shows."""
    path = Path(__file__).with_name("test_architecture.py")
    spec = importlib.util.spec_from_file_location("architecture_tables", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def read_purpose(folder: Path) -> str:
    """Return the first line of a package's docstring."""
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))) or ""
    return text.partition("\n")[0]


def draw_package(name: str, tables: ModuleType) -> list[str]:
    """Draw a package: its purpose, what it imports, and its sub-packages, the highest layer first."""
    folder = ROOT / "shardckpt" / name
    arrows = [other for other in ORDER if other in tables.ARROWS[name]]
    leaves = sorted(tables.ARROWS[name] - set(ORDER))
    lines = [f"### `shardckpt/{name}`", "", read_purpose(folder), ""]
    lines += [f"Imports: {', '.join(f'`{each}`' for each in [*arrows, *leaves])}.", ""]
    layers = tables.LAYERS.get(name, ())
    if not layers:
        modules = sorted(path.stem for path in folder.glob("*.py") if path.stem != "__init__")
        return [*lines, f"Modules: {', '.join(modules)}.", ""]
    listed = {each for layer in layers for each in layer}
    above = sorted(path.stem for path in folder.glob("*.py") if path.stem not in {"__init__", *listed})
    rows = [*([above] if above else []), *(sorted(layer) for layer in reversed(layers))]
    lines += ["| layer | modules |", "|---|---|"]
    for number, names in zip(range(len(rows), 0, -1), rows, strict=True):
        for each in names:
            if (folder / each).is_dir():
                inside = sorted(path.stem for path in (folder / each).glob("*.py") if path.stem != "__init__")
                lines.append(f"| {number} | **{each}/** {read_purpose(folder / each)} ({', '.join(inside)}) |")
        single = [each for each in names if not (folder / each).is_dir()]
        if single:
            lines.append(f"| {number} | {', '.join(single)} |")
    return [*lines, ""]


def draw(tables: ModuleType) -> str:
    """Draw all packages, the highest first."""
    return "\n".join(line for name in ORDER for line in draw_package(name, tables))


def test_the_page_draws_the_packages_as_they_are() -> None:
    text, drawing = PAGE.read_text(encoding="utf-8"), draw(load_tables())
    head, _, rest = text.partition(START)
    drawn, _, tail = rest.partition(END)
    if drawn != drawing and os.environ.get("UPDATE_DOCS"):
        PAGE.write_text(head + START + drawing + END + tail, encoding="utf-8")
        return
    assert drawn == drawing, "UPDATE_DOCS=1 pytest tests/test_architecture_page.py draws it anew"


def test_every_package_is_drawn() -> None:
    packages = {path.parent.name for path in (ROOT / "shardckpt").glob("*/__init__.py")}
    assert packages == set(ORDER)
