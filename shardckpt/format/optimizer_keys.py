"""How an optimizer's tensors are called in safetensors, and how its groups' file calls its parameters: read back.

`param_groups.json` says which of three ways it is; without a word, parameters go by names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardckpt.errors import FormatError

_KEYS = "keys"
_MOST_DIGITS = 18


@dataclass(frozen=True)
class OptimizerFile:
    """The content of `param_groups.json`, checked as far as it names parameters.

    Attributes:
        keys: `names`, `ids` or `flat`.
        groups: As it stands there.
        values: State that is no array, by parameter.
        names: Names that the groups have; empty with `ids`.
    """

    keys: str
    groups: object
    values: object
    names: frozenset[str]

    @classmethod
    def of(cls, raw: Mapping[str, object], where: str) -> OptimizerFile:
        """Return what the file says.

        Raises:
            FormatError: Parameters go by keys that are not known, or by numbers that are none.
        """
        keys, groups, values = raw.get(_KEYS, "names"), raw.get("param_groups", []), raw.get("non_tensor_state", {})
        if keys not in ("names", "ids", "flat"):
            raise FormatError("an unknown way to name parameters", where=where, found=keys, expected="names, ids, flat")
        if keys == "ids" and isinstance(values, dict):
            values = {_number(key): slots for key, slots in values.items()}
        names = {name for group in _listed(groups) for name in _params(group) if isinstance(name, str)}
        return cls(str(keys), groups, values, frozenset(names))

    def split(self, key: str) -> tuple[str | int, str]:
        """Return the parameter and the slot that a tensor's name means.

        Raises:
            FormatError: It has no number where it should.
        """
        if self.keys == "flat":
            return self._split_flat(key.removeprefix("state."))
        name, _, slot = key.rpartition("/")
        return (_number(name) if self.keys == "ids" else name), slot

    def _split_flat(self, key: str) -> tuple[str, str]:
        """Split at the longest start that names a parameter; where none does, at the last dot."""
        at = len(key)
        while (at := key.rfind(".", 0, at)) > 0:
            if key[:at] in self.names:
                return key[:at], key[at + 1 :]
        name, _, slot = key.rpartition(".")
        return name, slot


def _listed(groups: object) -> Sequence[object]:
    return groups if isinstance(groups, list) else ()


def _params(group: object) -> Sequence[object]:
    found = group.get("params") if isinstance(group, dict) else None
    return found if isinstance(found, list) else ()


def _number(key: str) -> int:
    if not (key.isascii() and key.isdigit()) or len(key) > _MOST_DIGITS:
        raise FormatError("a parameter of the optimizer has no number", found=key, expected="<number>/<slot>")
    return int(key)
