"""Reports as one HTML page that needs no network.

Each is one file with its data, styles and script inside.
"""

from __future__ import annotations

import base64
import html
import json
import re
import zlib
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib import resources
from typing import Any

from shardckpt.errors import TargetExistsError, UnsafeError
from shardckpt.storage.resolve_url import kind, open_store, split
from shardckpt.storage.store import read_bytes

_MARK = b'<!doctype html>\n<html lang="en">\n<!-- shardckpt report -->\n'


@cache
def _read_asset(name: str) -> str:
    return (resources.files(__package__) / "assets" / name).read_text(encoding="utf-8")


def render_page(title: str, data: Mapping[str, Any]) -> str:
    """Return a report's page."""
    # `data` is hostile: as deflated JSON in base64, its names cannot become elements or code. The script shows it as
    # text only. The page loads nothing, and its policy forbids that.
    packed = zlib.compress(json.dumps(data, separators=(",", ":"), allow_nan=False).encode(), 6)
    values = {
        "title": html.escape(title),
        "style": _read_asset("page.css"),
        "script": _read_asset("common.js") + _read_asset(f"{data['kind']}.js"),
        "data": base64.b64encode(packed).decode(),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: values[match[1]], _read_asset("page.html"))


def write_page(page: str, path: str) -> None:
    """Write a page at once; it replaces only an earlier report."""
    require_report_target(path)
    folder, name = split(path)
    with open_store(folder).create(name) as out:
        out.write(page.encode("utf-8"))


def require_report_target(path: str) -> None:
    """Require that a report may be written to `path`."""
    folder, name = split(path)
    found = kind(path)
    if found == "missing":
        return
    store = open_store(folder)
    with suppress(UnsafeError):  # a link to another folder, which a report does not follow
        if found == "file" and read_bytes(store, name, 0, min(store.size(name), len(_MARK))) == _MARK:
            return
    raise TargetExistsError(
        "a report replaces only an earlier report",
        where=path,
        found=f"a {found}" if found == "folder" else "another file",
        fix="Choose another path.",
    )
