"""bitsandbytes: what a packed weight needs besides its own elements, as arrays with names.

Names are the ones of bitsandbytes' `state_dict()` (`nn/modules.py`, `functional.py`: `QuantState.as_dict`, 0.50), which
transformers reads. A 4-bit weight has `absmax` and `quant_map`, nested ones too, and a JSON text as bytes. An 8-bit
weight has `SCB`, and `weight_format`, which is 0.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shardckpt.core.modules.fqn_and_params import clean
from shardckpt.errors import FormatError, UnsupportedError

_OFFSET = "nested_offset"  # the text's entry that belongs to the weight's values; the others describe its form


@dataclass(frozen=True)
class QuantState:
    """What belongs to one packed weight."""

    weight: str  # FQN
    arrays: Mapping[str, torch.Tensor]  # by FQN: live tensors, which a load fills
    text_name: str = ""  # FQN of the text; empty for an 8-bit weight
    text: Mapping[str, Any] = field(default_factory=dict)
    offset: torch.Tensor | None = None  # live; its value is in the text

    @property
    def names(self) -> tuple[str, ...]:
        """FQNs of all arrays, in the order of a `state_dict()`."""
        return (*self.arrays, *([self.text_name] if self.text_name else []))

    def encode_text(self) -> torch.Tensor:
        """Return the text as bytes."""
        return torch.tensor(list(json.dumps(self.text).encode()), dtype=torch.uint8)

    def find_difference(self, saved: torch.Tensor) -> str | None:
        """Return how a saved text differs in form; None if a load can fill the weight."""
        found = _decode(saved, self.text_name)
        keys = [key for key in {**self.text, **found} if key != _OFFSET and found.get(key) != self.text.get(key)]
        if (_OFFSET in found) != (self.offset is not None):
            keys.append(_OFFSET)
        texts = [f"{key}: found {found.get(key)}, expected {self.text.get(key)}" for key in keys]
        return "; ".join(texts) or None

    def load_text(self, saved: torch.Tensor) -> None:
        """Set the offset that a saved text has."""
        if self.offset is not None:
            self.offset.fill_(float(_decode(saved, self.text_name)[_OFFSET]))


def _decode(saved: torch.Tensor, where: str) -> dict[str, Any]:
    try:
        found = json.loads(bytes(saved.tolist()))
        if isinstance(found, dict) and isinstance(found.get(_OFFSET, 0.0), (int, float)):
            return found
    except (ValueError, RecursionError):
        pass
    raise FormatError("bytes must be JSON that bitsandbytes writes", where=where, found=f"{saved.numel()} bytes")


def find_quant_states(root: nn.Module) -> Iterator[QuantState]:
    """Yield the quant state of each packed weight of bitsandbytes in a module."""
    for prefix, module in root.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is None or not _is_packed(module, key, parameter):
                continue
            name = clean(f"{prefix}.{key}" if prefix else key)
            state = getattr(parameter, "quant_state", None) or getattr(module, "quant_state", None)
            if state is not None and state.quant_type is not None:
                yield _describe_4bit(_to_plain_format(module, parameter, state), name)
            elif (scales := _find_scales(module, parameter)) is not None:
                place = name.removesuffix(key)
                marker = torch.tensor(0, dtype=torch.uint8)
                yield QuantState(name, {f"{place}SCB": scales, f"{place}weight_format": marker})
            elif parameter.dtype is torch.int8:
                raise UnsupportedError(
                    "an 8-bit weight of bitsandbytes has lost its scales",
                    where=name,
                    found=type(parameter).__name__,
                    fix="Leave its layer out of `fully_shard` (`ignored_params`), which drops them.",
                )


def _is_packed(module: nn.Module, key: str, parameter: nn.Parameter) -> bool:
    """Return True for a weight of bitsandbytes; `fully_shard` replaces its class, and derives one from its module's."""
    kinds = type(module).__mro__ if key == "weight" else ()
    return any(kind.__module__.startswith("bitsandbytes.") for kind in (type(parameter), *kinds))


def _to_plain_format(module: nn.Module, parameter: Any, state: Any) -> Any:
    """Return the quant state of a weight in its usual format; a forward on some CPUs changes it."""
    if getattr(state, "packing_format_for_cpu", False):
        module._save_to_state_dict({}, "", True)
        return parameter.quant_state
    return state


def _describe_4bit(state: Any, name: str) -> QuantState:
    arrays = {f"{name}.absmax": state.absmax, f"{name}.quant_map": state.code}
    if state.nested:
        arrays |= {f"{name}.nested_absmax": state.state2.absmax, f"{name}.nested_quant_map": state.state2.code}
    text = {key: value for key, value in state.as_dict().items() if not isinstance(value, torch.Tensor)}
    text_name = f"{name}.quant_state.bitsandbytes__{state.quant_type}"
    form: dict[str, Any] = json.loads(json.dumps(text))  # tuples become lists, as in a saved text
    return QuantState(name, arrays, text_name, form, state.offset if state.nested else None)


def _find_scales(module: nn.Module, parameter: Any) -> torch.Tensor | None:
    """Return an 8-bit weight's scales; None while it is not quantized."""
    found = getattr(parameter, "SCB", None)
    return found if found is not None else getattr(getattr(module, "state", None), "SCB", None)
