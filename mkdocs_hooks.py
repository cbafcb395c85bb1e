"""Complete the site that mkdocs builds from docs/: source files that pages link to, and the list of decisions.

Pages link to files outside docs/ (`../examples/demo.py`), so that the links work in a checkout. The site gets a copy of
each such file below `source/`, and the links are rewritten to it. A link to a missing file is not changed, so
`mkdocs build --strict` fails.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent
COPIES = "source"
LINK = re.compile(r"(?<=\]\()\.\./[^)#\s]+")


def find_source(page: str, link: str) -> str | None:
    """Return the path of the file outside docs/ that a link leads to, or None if there is no such file.

    Args:
        page: Path of the page, relative to docs/.
        link: The link as written in the page.
    """
    target = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), link))
    is_outside = not target.startswith(("docs/", "../"))
    return target if is_outside and (ROOT / target).is_file() else None


def rewrite_links(markdown: str, page: str) -> str:
    """Return a page's text in which links to files outside docs/ lead to the copies of the site."""

    def rewrite(link: re.Match[str]) -> str:
        source = find_source(page, link[0])
        return posixpath.relpath(f"{COPIES}/{source}", posixpath.dirname(page) or ".") if source else link[0]

    return LINK.sub(rewrite, markdown)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Replace a folder in the navigation by its pages, in the order of their names."""
    config.nav = [_expand(entry, Path(config.docs_dir)) for entry in config.nav or []]
    return config


def _expand(entry: dict[str, object], docs: Path) -> dict[str, object]:
    [(title, target)] = entry.items()
    if not isinstance(target, str) or not target.endswith("/"):
        return entry
    return {title: [page.relative_to(docs).as_posix() for page in sorted((docs / target).glob("*.md"))]}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files outside docs/ that pages link to."""
    for source in sorted(set(_sources(files))):
        files.append(
            File.generated(
                config, f"{COPIES}/{source}", abs_src_path=str(ROOT / source), inclusion=InclusionLevel.NOT_IN_NAV
            )
        )
    return files


def _sources(files: Files) -> Iterator[str]:
    for file in files.documentation_pages():
        for link in LINK.findall(file.content_string):
            source = find_source(file.src_uri, link)
            if source:
                yield source


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Lead links to files outside docs/ to the copies of the site."""
    return rewrite_links(markdown, page.file.src_uri)
