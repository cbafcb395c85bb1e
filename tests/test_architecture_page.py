"""docs/architecture.md draws the packages as the sources are: layers, purposes, and who imports whom.

`UPDATE_DOCS=1 pytest tests/test_architecture_page.py` writes the drawing into the page.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
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


def list_modules(folder: Path) -> list[str]:
    """Return the modules in a folder; those of folders inside it follow, as `folder/module`."""
    own = sorted(path.stem for path in folder.glob("*.py") if path.stem != "__init__")
    below = sorted(path.parent for path in folder.glob("*/__init__.py"))
    return own + [f"{each.name}/{name}" for each in below for name in list_modules(each)]


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
                inside = list_modules(folder / each)
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


def read_stories() -> dict[str, tuple[set[str], set[str]]]:
    """Return each story's modules and the names of functions and classes that it uses, by its title."""
    text = PAGE.read_text(encoding="utf-8").partition("## Six stories")[2].partition("\n## ")[0]
    found = {}
    for part in re.split(r"^(?=\*\*)", text, flags=re.MULTILINE)[1:]:
        quoted = set(re.findall(r"`([^`]+)`", part))
        modules = {each for each in quoted if each.endswith(".py")}
        names = {each for each in quoted - modules if re.fullmatch(r"\w+(\.\w+)?", each) and each != "COMMIT"}
        found[part.partition("**")[2].partition("**")[0]] = modules, names
    return found


def list_defined(module: str) -> set[str]:
    """Return a module's classes and functions, and its classes' methods as `Class.method`."""
    defined: set[str] = set()
    for node in ast.parse((ROOT / "shardckpt" / module).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            defined.add(node.name)
        if isinstance(node, ast.ClassDef):
            defined |= {f"{node.name}.{each.name}" for each in node.body if isinstance(each, ast.FunctionDef)}
    return defined


def test_stories_name_functions_that_are_in_their_modules() -> None:
    stories = read_stories()
    assert len(stories) == 6
    for title, (modules, names) in stories.items():
        defined = set().union(*map(list_defined, modules))
        assert names - {"MismatchError", "plan"} <= defined, title


def test_stories_have_at_most_ten_steps() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert re.search(r"^1[1-9]\. |^\d{3,}\. ", text, re.MULTILINE) is None
