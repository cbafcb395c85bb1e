"""Storage of full buffers: given, taken back and counted. CPU; streams and pinning come with their first user."""

from __future__ import annotations

import torch


class StorageCounter:
    """Bytes that full buffers hold at the moment, for tests and reports; one for the process.

    Attributes:
        held: Bytes held now.
        peak: Most bytes held at once since the last `reset_peak`.
    """

    def __init__(self) -> None:
        self.held = 0
        self.peak = 0

    def add(self, nbytes: int) -> None:
        """Count bytes given (or, negative, taken back)."""
        self.held += nbytes
        self.peak = max(self.peak, self.held)

    def reset_peak(self) -> None:
        """Let the peak begin at what is held now."""
        self.peak = self.held


FULL_BYTES = StorageCounter()


class Resizable:
    """A 1-D tensor whose storage can be freed and filled again while tensors that alias it live on.

    Args:
        numel: Elements.
        dtype: Element type.
        device: Where it lies.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.tensor = torch.empty(numel, dtype=dtype, device=device)
        self._nbytes = numel * dtype.itemsize
        self._alive = True
        FULL_BYTES.add(self._nbytes)

    def __del__(self) -> None:
        if getattr(self, "_alive", False):
            FULL_BYTES.add(-self._nbytes)

    @property
    def alive(self) -> bool:
        """Tell whether the storage is there; its content may not be."""
        return self._alive

    def allocate(self) -> None:
        """Give the storage back its bytes, with any content; nothing when it has them."""
        if not self._alive:
            self.tensor.untyped_storage().resize_(self._nbytes)
            self._alive = True
            FULL_BYTES.add(self._nbytes)

    def free(self) -> None:
        """Take the storage's bytes; nothing when they are gone."""
        if self._alive:
            self.tensor.untyped_storage().resize_(0)
            self._alive = False
            FULL_BYTES.add(-self._nbytes)
