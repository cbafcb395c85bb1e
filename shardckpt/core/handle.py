"""What stands for full parameters that are being gathered."""

from __future__ import annotations

from collections.abc import Callable


class UnshardHandle:
    """What an asynchronous `unshard` returns.

    Args:
        fill: Waits for the parameters and registers them.
    """

    def __init__(self, fill: Callable[[], None]) -> None:
        self._fill: Callable[[], None] | None = fill

    def wait(self) -> None:
        """Return when the full parameters are there and registered; nothing when that was waited for before."""
        fill, self._fill = self._fill, None
        if fill is not None:
            fill()
