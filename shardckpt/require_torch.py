"""The check that torch is installed: where it is not, the error says what to install."""

from __future__ import annotations

from importlib import import_module

from shardckpt.errors import MissingTorchError

__all__ = ["require_torch"]


def require_torch(where: str) -> None:
    """Import torch.

    Args:
        where: What needs it, for the message.

    Raises:
        MissingTorchError: It is not installed.
    """
    try:
        import_module("torch")
    except ModuleNotFoundError as error:
        if error.name != "torch":  # it is installed, and lacks a module that it needs itself
            raise
        fix = "Run pip install 'shardckpt[torch]'."
        raise MissingTorchError("torch must be installed", where=where, fix=fix) from None
