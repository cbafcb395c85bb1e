"""The function that SGLang calls to load weights, and what a trainer sends to it."""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn

from shardckpt import Subscriber
from shardckpt.errors import UsageError

if TYPE_CHECKING:
    from shardckpt.stream.receive.subscriber import Staged
    from shardckpt.stream.receive.targets import TensorChange

__all__ = ["LOADER", "apply", "make_update"]

LOADER = "shardckpt.integrations.sglang.apply"
"""Value of `load_format` for updates, and of the server's `--custom-weight-loader`."""


class _Update(NamedTuple):
    """What an update says."""

    url: str
    version: int
    mirror: str | None
    timeout_s: float


class _Follower(NamedTuple):
    """What a model follows."""

    source: tuple[str, str | None]  # stream and mirror
    subscriber: Subscriber
    loader: _Loader


_FOLLOWERS: WeakKeyDictionary[nn.Module, _Follower] = WeakKeyDictionary()  # of this worker


def make_update(
    url: str | os.PathLike[str], version: int, *, mirror: str | None = None, timeout_s: float = 60.0
) -> list[tuple[str, torch.Tensor]]:
    """Return what a trainer sends to `update_weights_from_tensor`, with `LOADER` as its `load_format`.

    It names the version; each worker reads it from the stream.

    Args:
        url: The stream, which the server reaches.
        version: Number of the version.
        mirror: Folder on the server for the held version, as for `Subscriber`; by default memory of each worker.
        timeout_s: Seconds that workers wait for the version.

    Examples:
        >>> MultiprocessingSerializer.serialize(make_update(url, 12), output_str=True)  # doctest: +SKIP
    """
    text = os.fspath(url)
    absolute = text if "://" in text else os.path.abspath(text)  # the server has another working directory
    update = _Update(absolute, version, mirror, timeout_s)
    _check(update)
    # The text is the name: a tensor with elements would be in memory that only processes of this machine can open.
    return [(json.dumps(update._asdict()), torch.empty(0, dtype=torch.uint8))]


def apply(model: nn.Module, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Load a version into a model. SGLang calls it in each worker, in a session that `begin_weight_update` has opened.

    All workers load the version, or this raises on all of them. After an error, the next update replaces all weights.

    Args:
        model: The worker's model, which has SGLang's `load_weights`.
        named_tensors: What `make_update` returned.

    Raises:
        UsageError: `named_tensors` names no version.
        SourceNotFoundError: The version is not published within the limit. The model is unchanged.
        PoisonedError: A worker failed after the first write. Do not serve these weights.
    """
    update = _read(named_tensors)
    follower = _follow(model, update)
    follower.loader.load(follower.subscriber.stage(update.version, timeout_s=update.timeout_s))


class _Loader:
    """Target of `Staged.commit`: the same one for all updates of a model, so that a held version is known."""

    def __init__(self, model: nn.Module) -> None:
        self._model: weakref.ref[Any] = weakref.ref(model)
        self._staged: Staged | None = None

    def load(self, staged: Staged) -> None:
        """Load a version on all workers, or on none."""
        self._staged = staged
        try:
            staged.commit(self)
        finally:
            self._staged = None

    def apply(self, _changes: Iterable[TensorChange]) -> None:
        """Load all tensors: SGLang converts what it loads, so it may have no earlier values to change."""
        model, staged = self._model(), self._staged
        assert model is not None and staged is not None, "`load` calls this"
        if not staged.is_held:
            model.load_weights(staged.iter_tensors())


def _follow(model: nn.Module, update: _Update) -> _Follower:
    source = (update.url, update.mirror)
    known = _FOLLOWERS.get(model)
    if known is not None and known.source != source:
        known.subscriber.close()
        known = None
    if known is None:
        known = _FOLLOWERS[model] = _Follower(source, Subscriber(update.url, mirror=update.mirror), _Loader(model))
    return known


def _read(named_tensors: Sequence[tuple[str, torch.Tensor]]) -> _Update:
    try:
        ((text, _),) = named_tensors
        update = _Update(**json.loads(text))
    except (ValueError, TypeError) as error:
        fix = "Send what make_update(url, version) returns."
        raise UsageError("an update must name a version of a stream", found=repr(named_tensors), fix=fix) from error
    _check(update)
    return update


def _check(update: _Update) -> None:
    is_number = isinstance(update.version, int) and not isinstance(update.version, bool)
    if not (isinstance(update.url, str) and is_number and isinstance(update.mirror, (str, type(None)))):
        raise UsageError("an update must have a URL, a version's number, and a folder or None", found=repr(update))
