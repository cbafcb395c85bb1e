"""Complete the site that mkdocs builds from docs/: source files that pages link to.

Pages link to files outside docs/ (`../examples/demo.py`), so that the links work in a checkout. The site gets a copy of
each such file below `source/`, and the links are rewritten to it. A copy can be a page, such as README.md: its links
are those of the original. A link to a missing file is not changed, so `mkdocs build --strict` fails.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent
COPIES = "source/"
DOCS = "docs/"
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|/|#)[^)#\s]+")


def find_original(page: str) -> str:
    """Return the path in the repository of a page of the site."""
    return page.removeprefix(COPIES) if page.startswith(COPIES) else DOCS + page


def find_target(page: str, link: str) -> str | None:
    """Return the path in the site of the file that a link leads to, or None if there is no such file.

    Args:
        page: Path of the page in the site.
        link: The link as written in the page: a path relative to the page in the repository.
    """
    target = posixpath.normpath(posixpath.join(posixpath.dirname(find_original(page)), link))
    if target.startswith("../") or not (ROOT / target).is_file():
        return None
    return target.removeprefix(DOCS) if target.startswith(DOCS) else COPIES + target


def rewrite_links(markdown: str, page: str) -> str:
    """Return a page's text in which the links of the repository are those of the site."""

    def rewrite(link: re.Match[str]) -> str:
        target = find_target(page, link[0])
        return posixpath.relpath(target, posixpath.dirname(page) or ".") if target else link[0]

    return LINK.sub(rewrite, markdown)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files outside docs/ that pages link to, and those that these link to."""
    waiting = list(files.documentation_pages())
    while waiting:
        copies = [_copy(target, config) for target in _find_copies(waiting.pop()) if target not in files.src_uris]
        for copy in copies:
            files.append(copy)
        waiting += [copy for copy in copies if copy.is_documentation_page()]
    return files


def _find_copies(page: File) -> set[str]:
    targets = (find_target(page.src_uri, link) for link in LINK.findall(page.content_string))
    return {target for target in targets if target and target.startswith(COPIES)}


def _copy(target: str, config: MkDocsConfig) -> File:
    original = str(ROOT / find_original(target))
    return File.generated(config, target, abs_src_path=original, inclusion=InclusionLevel.NOT_IN_NAV)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Lead links of the repository to their places in the site."""
    return rewrite_links(markdown, page.file.src_uri)
