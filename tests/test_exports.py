"""Public names: `shardckpt.__all__` is sorted, is exactly what is public, and every name in it can be had.

Each of them, and of those of the public packages, is on one page of docs/api.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import json
import re
import subprocess
import sys
import types
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name

import pytest

import shardckpt
from shardckpt import errors

SOURCE = Path(shardckpt.__file__).read_text(encoding="utf-8")
API_PAGES = Path(__file__).resolve().parents[1] / "docs" / "api"
PACKAGES = (
    "shardckpt",
    "shardckpt.core",
    "shardckpt.core.errors",
    "shardckpt.data",
    "shardckpt.errors",
    "shardckpt.events",
    "shardckpt.results",
    "shardckpt.state",
    "shardckpt.testing",
)
LOADED_ON_FIRST_USE = ("shardckpt.core", "shardckpt.state")
MODULE_OF = {"shardckpt.core": "errors", "shardckpt.state": "keys"}
"""One sub-module of each, which users reach as an attribute."""


def names_for_types(source: str) -> dict[str, str]:
    """Return what a module imports for type checkers only: public name to the module it comes from."""
    blocks = [
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    found = {}
    for node in [each for block in blocks for each in block.body]:
        assert isinstance(node, ast.ImportFrom), ast.unparse(node)
        found.update({alias.asname or alias.name: str(node.module) for alias in node.names})
    return found


def borrowed(source: str) -> set[str]:
    """Return the names that a module imports from the standard library for its own use."""
    found = [node for node in ast.parse(source).body if isinstance(node, ast.Import | ast.ImportFrom)]
    kept = [n for n in found if not (isinstance(n, ast.ImportFrom) and str(n.module).startswith("shardckpt"))]
    return {alias.asname or alias.name for node in kept for alias in node.names}


def public_names(module: types.ModuleType, own: set[str]) -> set[str]:
    """Return what a visitor finds: no underscore, no submodule that some import left there, nothing of `own`."""
    shown = {name for name in dir(module) if not name.startswith("_")} - own
    return {name for name in shown if name in module.__all__ or not isinstance(getattr(module, name), types.ModuleType)}


def test_all_is_sorted_and_names_nothing_twice() -> None:
    assert list(shardckpt.__all__) == sorted(set(shardckpt.__all__))


def test_all_is_exactly_what_is_public() -> None:
    assert public_names(shardckpt, borrowed(SOURCE)) == {name for name in shardckpt.__all__ if not name.startswith("_")}


def test_the_table_for_type_checkers_is_the_table_for_the_interpreter() -> None:
    lazy = {name for name, home in names_for_types(SOURCE).items() if home != "shardckpt"}
    assert lazy | {"__version__"} == set(shardckpt.__all__) | {"__version__"}


@pytest.mark.parametrize("path", LOADED_ON_FIRST_USE)
def test_packages_load_each_name_from_where_type_checkers_look(path: str) -> None:
    package = import_module(path)
    typed = names_for_types(Path(str(package.__file__)).read_text(encoding="utf-8"))
    assert sorted(typed) == package.__all__
    assert {name: getattr(package, name) is getattr(import_module(home), name) for name, home in typed.items()} == (
        dict.fromkeys(package.__all__, True)
    )


@pytest.mark.parametrize("path", LOADED_ON_FIRST_USE)
def test_a_package_lists_its_names_and_loads_them_and_its_modules_when_they_are_used(path: str) -> None:
    code = f"""
import json, sys
import {path} as package

def loaded():
    return [name for name in sys.modules if name.startswith("{path}.") and not name.endswith(".lazy_names")]

listed = dir(package)
first = loaded()
missing = [name for name in ("no_such_name", "__wrapped__") if hasattr(package, name)]
modules = [package.{MODULE_OF[path]}.__name__]
from {path} import *
print(json.dumps([first, missing, modules, sorted(set(package.__all__) - set(listed)), len(loaded())]))
"""
    first, missing, modules, unlisted, now = json.loads(run(code))
    assert (first, missing, modules, unlisted) == ([], [], [f"{path}.{MODULE_OF[path]}"], [])
    assert now > 1


def run(code: str) -> str:
    """Return what a program prints in a fresh interpreter."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("name", shardckpt.__all__)
def test_every_public_name_can_be_had_and_comes_from_where_type_checkers_look(name: str) -> None:
    value = getattr(shardckpt, name)
    origin = names_for_types(SOURCE).get(name)
    if isinstance(value, types.ModuleType):
        assert callable(value), "a room under a public name has to be the verb too"
    elif origin:
        assert value.__module__ == origin


@pytest.mark.parametrize("name", [n for n in shardckpt.__all__ if not n.startswith("__")])
def test_every_public_name_is_documented(name: str) -> None:
    assert (getattr(shardckpt, name).__doc__ or "").strip()


def read_api_pages() -> list[str]:
    """Return the paths of the names that the API pages show."""
    text = "".join(page.read_text(encoding="utf-8") for page in API_PAGES.glob("*.md"))
    return re.findall(r"^::: (\S+)$", text, re.MULTILINE)


def undocumented(packages: Mapping[str, object], shown: list[str]) -> list[str]:
    """Return the public names of packages that no API page shows, under their own path or another one."""
    values = {id(resolve_name(path)) for path in shown}
    names = [(path, name) for path, package in packages.items() for name in package.__all__ if name != "__version__"]
    return [f"{path}.{name}" for path, name in names if id(getattr(packages[path], name)) not in values]


def test_every_public_name_is_on_a_page_of_the_api() -> None:
    packages = {path: import_module(path) for path in PACKAGES}
    assert undocumented(packages, read_api_pages()) == [], "add `::: NAME` to a page of docs/api"


def test_no_name_is_on_two_places_of_the_api() -> None:
    shown = [resolve_name(path) for path in read_api_pages()]
    assert len({id(value) for value in shown}) == len(shown)


def list_documented(name: str, value: object) -> Iterator[tuple[str, str]]:
    """Yield the docstrings of a public function, or of a public class and its public methods."""
    yield name, inspect.getdoc(value) or ""
    if isinstance(value, type):
        for member, function in vars(value).items():
            if not member.startswith("_") and callable(function):
                yield f"{name}.{member}", inspect.getdoc(function) or ""


def read_raised(doc: str) -> list[str]:
    """Return the names of the errors in the `Raises:` section of a docstring."""
    section = re.search(r"^Raises:\n((?: {4}.*\n?)*)", doc, re.MULTILINE)
    return re.findall(r"^ {4}(\w+):", section[1], re.MULTILINE) if section else []


@pytest.mark.parametrize("path", PACKAGES)
def test_errors_that_public_functions_name_are_public(path: str) -> None:
    package = import_module(path)
    lists = (
        import_module(name).__all__
        for name in ("shardckpt", "shardckpt.data", "shardckpt.state", "shardckpt.core.errors")
    )
    public = {*vars(builtins), *vars(errors), *(name for names in lists for name in names)}
    documented = (each for name in package.__all__ for each in list_documented(name, getattr(package, name)))
    assert [(name, raised) for name, doc in documented for raised in read_raised(doc) if raised not in public] == []


def test_every_error_of_the_engine_is_in_the_module_of_its_errors() -> None:
    module = import_module("shardckpt.core.errors")
    classes = {name: value for name, value in vars(module).items() if isinstance(value, type)}
    assert module.__all__ == sorted(name for name, value in classes.items() if value.__module__ == module.__name__)
    for file in Path(str(module.__file__)).parent.rglob("*.py"):
        found = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ClassDef)]
        own = {node.name for node in found if {ast.unparse(base) for base in node.bases} & classes.keys()}
        assert file.name == "errors.py" or not own, file


def test_the_names_of_errors_are_read_from_a_docstring() -> None:
    doc = "Do it.\n\nRaises:\n    OSError: One\n        part: two.\n    HiddenError: Text.\n\nExamples:\n    a: b"
    assert read_raised(doc) == ["OSError", "HiddenError"]


def test_a_name_that_no_page_of_the_api_shows_is_found() -> None:
    package = types.ModuleType("example")
    package.__dict__.update(__all__=["load", "diff"], load=shardckpt.load, diff=shardckpt.diff)
    assert undocumented({"example": package}, ["shardckpt.diff"]) == ["example.load"]


def test_a_name_that_is_not_there_is_an_attribute_error_that_names_it() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        shardckpt.no_such_name  # noqa: B018  # the access is the test


def test_a_public_name_outside_all_would_be_seen() -> None:
    module = types.ModuleType("example")
    module.__dict__.update(__all__=["a"], a=1, b=2, sys=4, json=types.ModuleType("json"), _c=3)
    assert public_names(module, {"sys"}) == {"a", "b"}
