"""The function `open`, which returns torch tensors, or NumPy arrays without torch."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Literal, overload

from shardckpt.errors import UsageError, require_torch

if TYPE_CHECKING:
    from shardckpt.checkpoint.load.lazy import OpenedTensors
    from shardckpt.offline.open_arrays import OpenedArrays
    from shardckpt.reader import NamedBases

__all__ = ["open"]


@overload
def open(
    path: str | os.PathLike[str],
    *,
    verify: str | bool = "read",
    base: NamedBases | None = None,
    framework: Literal["torch"] = "torch",
) -> OpenedTensors: ...


@overload
def open(
    path: str | os.PathLike[str],
    *,
    verify: str | bool = "read",
    base: NamedBases | None = None,
    framework: Literal["numpy"],
) -> OpenedArrays: ...


def open(
    path: str | os.PathLike[str],
    *,
    verify: str | bool = "read",
    base: NamedBases | None = None,
    framework: str = "torch",
) -> OpenedTensors | OpenedArrays:
    """Open a checkpoint of any format to read parts of it.

    For example, `open(path)["model.layers.0.weight"][0:128]` reads a slice. `with open(path) as checkpoint:`
    closes its files at the end of the block.

    Args:
        path: Path or URL of the checkpoint.
        verify: `"read"` checks each block that is read against its hash; False does not.
        base: Folder of the base checkpoint if it was moved, as for `load`.
        framework: `"torch"` returns torch tensors. `"numpy"` returns NumPy arrays, with dtypes of `ml_dtypes` for
            bfloat16 and float8, and does not need torch.

    Raises:
        SourceNotFoundError: The path does not exist.
        CheckpointError: The checkpoint cannot be read.
        UsageError: `verify` or `framework` has an unknown value.
        MissingTorchError: The framework is torch, which is not installed.
    """
    if framework not in ("torch", "numpy"):
        raise UsageError("`framework` must be 'torch' or 'numpy'", found=repr(framework))
    if framework == "numpy":
        from shardckpt.offline.open_arrays import open_arrays  # noqa: PLC0415  (tensors need no arrays)

        return open_arrays(path, verify=verify, base=base)
    require_torch("shardckpt.open", or_else="pass framework='numpy'")
    from shardckpt.checkpoint.load.lazy import open as open_tensors  # noqa: PLC0415  (arrays need no torch)

    return open_tensors(path, verify=verify, base=base)
