"""Names that become equal without the segments of wrappers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from shardckpt.core.modules.fqn_and_params import clean
from shardckpt.errors import NameCollisionError

_FIX = (
    "Names are without the segments of wrappers (`_orig_mod` of torch.compile, `_fsdp_wrapped_module`,"
    " `_checkpoint_wrapped_module`, `module` of DDP). Rename one of the two, or its module."
)


def build_collision(root: nn.Module, name: str, *places: tuple[nn.Module, str]) -> NameCollisionError:
    """Return the error for two tensors of a model that have one name.

    Args:
        root: Model with both.
        name: Name of both, without the segments of wrappers.
        places: Module and attribute of each.
    """
    paths = {id(module): path for path, module in root.named_modules()}
    return _build(name, [f"{paths[id(module)]}.{attribute}".removeprefix(".") for module, attribute in places])


def clean_keys(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state without the segments of wrappers in its names.

    Raises:
        NameCollisionError: Two names with different values become equal.
    """
    cleaned: dict[str, Any] = {}
    for name, value in state.items():
        if cleaned.setdefault(clean(name), value) is not value:
            raise _build(clean(name), [each for each in state if clean(each) == clean(name)])
    return cleaned


def require_distinct(names: Iterable[str]) -> None:
    """Require that no two names become equal without the segments of wrappers.

    Raises:
        NameCollisionError: Two become equal; the message names both.
    """
    clean_keys({name: name for name in names})


def _build(name: str, spellings: Iterable[str]) -> NameCollisionError:
    listed = " and ".join(map(repr, spellings))
    return NameCollisionError(f"{listed} would both be named {name!r}", fix=_FIX)
