"""docs/architecture.md draws the packages as the contracts in pyproject.toml have them: layers, and who imports whom.

`UPDATE_DOCS=1 pytest tests/test_architecture_page.py` writes the drawing into the page.
"""

from __future__ import annotations

import ast
import itertools
import os
import re
import sys
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "architecture.md"
START, END = "<!-- drawing: tests/test_architecture_page.py -->\n", "<!-- end of drawing -->\n"
CONFIGURATION = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT: dict[str, Any] = CONFIGURATION["project"]
CONTRACTS: list[dict[str, Any]] = CONFIGURATION["tool"]["importlinter"]["contracts"]


def list_importers() -> dict[str, set[str]]:
    """Return who may import each module or library that a contract protects."""
    rules = [rule for rule in CONTRACTS if rule["type"] == "protected"]
    return {name: {*rule["allowed_importers"]} for rule in rules for name in rule["protected_modules"]}


def list_layers() -> dict[str, list[list[str]]]:
    """Return the layers of each package, the highest first."""
    rules = [rule for rule in CONTRACTS if rule["type"] == "layers"]
    return {rule["containers"][0]: [re.split(r" [|:] ", layer) for layer in rule["layers"]] for rule in rules}


IMPORTERS, LAYERS = list_importers(), list_layers()
NAMES = list(itertools.chain.from_iterable(LAYERS["shardckpt"]))
"""The packages and modules below `shardckpt`, the highest first."""
PACKAGES = [name for name in NAMES if (ROOT / "shardckpt" / name).is_dir()]


def read_purpose(folder: Path) -> str:
    """Return the first line of a package's docstring."""
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))) or ""
    return text.partition("\n")[0]


def list_modules(folder: Path) -> list[str]:
    """Return the modules in a folder; those of folders inside it follow, as `folder/module`."""
    own = sorted(path.stem for path in folder.glob("*.py") if path.stem != "__init__")
    below = sorted(path.parent for path in folder.glob("*/__init__.py"))
    return own + [f"{each.name}/{name}" for each in below for name in list_modules(each)]


def draw_package(name: str) -> list[str]:
    """Draw a package: its purpose, what it imports, and its sub-packages, the highest layer first."""
    folder = ROOT / "shardckpt" / name
    imported = [other for other in NAMES if f"shardckpt.{name}" in IMPORTERS[f"shardckpt.{other}"]]
    imported += ["shardckpt"] * (f"shardckpt.{name}.**" in IMPORTERS["shardckpt"])
    lines = [f"### `shardckpt/{name}`", "", read_purpose(folder), ""]
    lines += [f"Imports: {', '.join(f'`{each}`' for each in imported)}.", ""]
    layers = LAYERS.get(f"shardckpt.{name}", [])
    if not layers:
        return [*lines, f"Modules: {', '.join(list_modules(folder))}.", ""]
    lines += ["| layer | modules |", "|---|---|"]
    for number, names in zip(range(len(layers), 0, -1), layers, strict=True):
        for each in names:
            if (folder / each).is_dir():
                inside = ", ".join(list_modules(folder / each))
                lines.append(f"| {number} | **{each}/** {read_purpose(folder / each)} ({inside}) |")
        single = [each for each in names if not (folder / each).is_dir()]
        if single:
            lines.append(f"| {number} | {', '.join(single)} |")
    return [*lines, ""]


def draw() -> str:
    """Draw all packages, the highest first."""
    return "\n".join(line for name in PACKAGES for line in draw_package(name))


def test_the_page_draws_the_packages_as_they_are() -> None:
    text, drawing = PAGE.read_text(encoding="utf-8"), draw()
    head, _, rest = text.partition(START)
    drawn, _, tail = rest.partition(END)
    if drawn != drawing and os.environ.get("UPDATE_DOCS"):
        PAGE.write_text(head + START + drawing + END + tail, encoding="utf-8")
        return
    assert drawn == drawing, "UPDATE_DOCS=1 pytest tests/test_architecture_page.py draws it anew"


def test_contracts_say_who_imports_each_package_and_the_layers_of_each_folder() -> None:
    assert {f"shardckpt.{name}" for name in NAMES} <= set(IMPORTERS)
    folders = {f"shardckpt.{path.parent.parent.name}" for path in (ROOT / "shardckpt").glob("*/*/__init__.py")}
    assert folders <= set(LAYERS)


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
