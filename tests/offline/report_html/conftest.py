"""A browser for the tests of pages."""

from collections.abc import Iterator

import pytest

from tests.kit.runs.browser import PROGRAM, Page, open_browser


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    """A page of a browser, without which the test is skipped."""
    if PROGRAM is None:
        pytest.skip("needs chromium")
    with open_browser() as opened:
        yield opened
