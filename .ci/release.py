"""Build and check a release from the last commit, and write its notes; `make release` runs it.

    python .ci/release.py [--docs URL]

The archives and `NOTES.md` are in `dist`. Nothing is uploaded and nothing is tagged: the last lines say how.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!\w+:|#)([^)\s]+)\)")


def read_version(source: Path) -> str:
    """Return the version, which `shardckpt/__init__.py` alone has."""
    found = re.search(r'^__version__ = "([^"]+)"$', (source / "shardckpt/__init__.py").read_text("utf-8"), re.MULTILINE)
    if found is None:
        raise SystemExit("shardckpt/__init__.py has no __version__")
    return found[1]


def read_notes(changelog: str, version: str) -> str:
    """Return the changelog's section for a version. Raises SystemExit if it is missing or not dated."""
    section = re.search(rf"^## {re.escape(version)}\b(.*?)\n(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL)
    if section is None:
        raise SystemExit(f"CHANGELOG.md must have a section for {version}, the version in shardckpt/__init__.py")
    if not re.fullmatch(r" \(\d{4}-\d\d-\d\d\)", section[1]):
        raise SystemExit(f"the section for {version} in CHANGELOG.md must end with its date, got{section[1]!r}")
    return section[2].strip() + "\n"


def rewrite_links(text: str, docs: str) -> str:
    """Return a README whose links do not depend on the files beside it.

    With the address of the documentation, its pages and pictures become addresses there. All other links to files
    become their text, and pictures without an address are left out.
    """

    def replace(found: re.Match[str]) -> str:
        is_image, label, target = bool(found[1]), found[2], found[3]
        path, _, anchor = target.partition("#")
        if not docs or not path.startswith("docs/"):
            return "" if is_image else label
        page = path.removeprefix("docs/")
        if page.endswith(".md"):
            page = re.sub(r"(^|/)index/$", r"\1", f"{page.removesuffix('.md')}/")
        return f"{found[1]}[{label}]({docs.rstrip('/')}/{page}{'#' if anchor else ''}{anchor})"

    return _LINK.sub(replace, text)


def copy_commit(into: Path) -> None:
    """Write the files of the last commit into a folder. Raises SystemExit if others differ from them."""
    changed = run("git", "status", "--porcelain").strip()
    if changed:
        raise SystemExit(f"commit or remove these files first:\n{changed}")
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=BytesIO(archive)) as files:
        files.extractall(into, filter="data")


def build(source: Path, into: Path, docs: str, python: Callable[..., str]) -> list[Path]:
    """Build both archives and check them; return their paths."""
    readme = source / "README.md"
    readme.write_text(rewrite_links(readme.read_text("utf-8"), docs), "utf-8")
    python("-m", "build", "--outdir", str(into), str(source))
    archives = sorted(path for path in into.iterdir() if path.name.endswith((".whl", ".tar.gz")))
    python("-m", "twine", "check", "--strict", *map(str, archives))
    return archives


def run(*command: str) -> str:
    """Return what a command prints. Raises SystemExit with its output if it fails."""
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command[:4])} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def main() -> None:
    """Build, check, and print what is left to do."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--docs", default="", help="Address of the published documentation, for links in the README.")
    docs = parser.parse_args().docs
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "source")
        copy_commit(source)
        version = read_version(source)
        notes = read_notes((source / "CHANGELOG.md").read_text("utf-8"), version)
        built = Path(folder, "dist")
        names = [path.name for path in build(source, built, docs, lambda *given: run(sys.executable, *given))]
        shutil.rmtree(DIST, ignore_errors=True)
        shutil.copytree(built, DIST)
    (DIST / "NOTES.md").write_text(notes, "utf-8")
    for name in names:
        print(f"dist/{name}  {(DIST / name).stat().st_size:,} B")
    print("dist/NOTES.md")
    print(f"Next: git tag -a v{version} -F dist/NOTES.md && git push origin v{version}")
    print("then: python -m twine upload dist/*.whl dist/*.tar.gz")


if __name__ == "__main__":
    main()
