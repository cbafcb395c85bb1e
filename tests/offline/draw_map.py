"""Draw the picture of the README: the page of `shardckpt inspect --html`, as a browser shows it.

    python -m tests.offline.draw_map run/step-60 docs/images/map.png

`run/step-60` is the step that docs/tutorial.md leaves behind, and the picture shows this path: run it where `run` is,
with the checkout in PYTHONPATH. Needs Chromium.
"""

from __future__ import annotations

import base64
import sys
import tempfile
from pathlib import Path

import shardckpt
from tests.kit.runs.browser import open_browser

SIZE = {"x": 0, "y": 0, "width": 1280, "height": 800, "scale": 0.8}  # pixels of the page, from its top
MOST_BYTES = 200_000


def draw(source: str, picture: Path) -> None:
    """Write the picture of a checkpoint."""
    with tempfile.TemporaryDirectory() as folder, open_browser() as page:
        shardckpt.inspect(source, html=f"{folder}/map.html")
        page.open(f"file://{folder}/map.html")
        data = base64.b64decode(page.call("Page.captureScreenshot", clip=SIZE, captureBeyondViewport=True)["data"])
    if len(data) > MOST_BYTES:
        raise SystemExit(f"the picture must have at most {MOST_BYTES} bytes, got {len(data)}")
    picture.write_bytes(data)


if __name__ == "__main__":
    draw(sys.argv[1], Path(sys.argv[2]))
