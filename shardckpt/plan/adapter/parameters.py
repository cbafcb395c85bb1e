"""Find the parameters that an adapter's factors belong to, such as experts in 3 dimensions.

peft (`ParamWrapper`) names such factors by the module alone: the module's further parameters are in `base_layer`. So
shapes decide which factors belong to which parameter, and which of its dimensions is the input.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import NamedTuple

from shardckpt.boxes import Shape
from shardckpt.errors import AmbiguousError, UsageError
from shardckpt.plan.adapter.name_ends import NameEnds
from shardckpt.plan.adapter.names import Role
from shardckpt.plan.adapter.settings import Settings

__all__ = ["LowRank", "count_levels", "find_stored_name", "list_names", "place_factors", "strip_levels"]

_LEVEL = ".base_layer"
_MOST = 5  # parameters in a module
# Stacked parameters, and the names of one expert's weights for their rows, in transformers' files.
_STACKED = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "down_proj": (("down_proj",), ("w2",)),
}
_MODULES = ((".mlp.", ".block_sparse_moe."),)  # in memory, and in files
# Whether experts' weights are `in x out` in memory, by model type; for square weights, which shapes leave open.
_IS_TURNED = {
    **dict.fromkeys(("aria", "aria_text", "gpt_oss", "openai_privacy_filter"), True),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe", "llama4", "llama4_text", "minimax"), False),
    **dict.fromkeys(("mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "qwen3_next"), False),
}


@dataclass(frozen=True, slots=True)
class LowRank:
    """A weight, and two factors whose product a merge adds to it."""

    weight: str  # name in the base
    a: str  # name in the adapter: first factor, `rank x in`
    b: str  # name in the adapter: second factor, `out x rank`
    scale: float  # multiplies the product
    is_turned: bool  # whether the weight is `in x out`, as in an embedding and a `Conv1D`
    magnitude: str = ""  # name in the adapter: norms that the result's rows get (DoRA); its columns if it is turned
    # `a` has this many blocks of rows, one for each expert; `b` has each expert's columns this many columns apart.
    experts: int = 1
    expert: int = 0  # the weight's first
    row: int = 0  # of `b` for the weight's first row


class _StoredRows(NamedTuple):
    """A tensor of the base that holds a parameter, or some of its rows for one expert."""

    name: str
    expert: int
    row: int


class _Parameter(NamedTuple):
    key: str  # full name in memory
    shape: Shape
    parts: tuple[_StoredRows, ...]

    @property
    def experts(self) -> int:
        return self.shape[0] if len(self.shape) == 3 else 1

    @property
    def is_one_tensor(self) -> bool:
        return len(self.parts) == 1 and self.parts[0].name == self.key


def strip_levels(module: str) -> str:
    """Return a module's name without the levels of nested factors."""
    end = len(module)
    while module.endswith(_LEVEL, 0, end):
        end -= len(_LEVEL)
    return module[:end]


def count_levels(module: str) -> int:
    """Return how many levels of a module its factors are in."""
    return (len(module) - len(strip_levels(module))) // len(_LEVEL)


def find_stored_name(name: str, base: Mapping[str, Shape]) -> str:
    """Return a tensor's name in the base, whose files may name a module in another way than the model in memory."""
    names = (name, *(name.replace(*pair) for pair in _MODULES))
    return next((each for each in names if each in base), name)


def list_names(module: str, ends: NameEnds, base: Mapping[str, Shape], where: str) -> list[str]:
    """Return the base's tensors that hold a module's parameters with factors."""
    return [part.name for each in _find_parameters(module, ends, base, where) for part in each.parts]


def place_factors(
    module: str,
    levels: Sequence[Mapping[Role, str]],
    ends: NameEnds,
    settings: Settings,
    adapter: Mapping[str, Shape],
    base: Mapping[str, Shape],
    model_type: object,
    where: str,
) -> list[LowRank]:
    """Return the products for a module's parameters, from its factors at each depth."""
    parameters = _find_parameters(module, ends, base, where)
    if len(parameters) != len(levels) or len(levels) > _MOST:
        raise UsageError(
            f"each parameter of {module} in target_parameters must have two factors",
            where=where,
            found=f"{2 * len(levels)} factors for {', '.join(each.key for each in parameters) or 'no such parameter'}",
            fix="Name the base that the adapter was trained on; --rename gives it other names.",
        )
    shapes = [tuple(adapter[sides[side]] for side in "AB") for sides in levels]
    ranks = [settings.rank(each.key) for each in parameters]
    options = [
        (order, is_turned)
        for order in permutations(range(len(levels)))
        for is_turned in (False, True)
        if all(
            _fits(parameters[i], ranks[i], shapes[at], is_turned=is_turned and _may_turn(parameters[i]))
            for i, at in enumerate(order)
        )
    ]
    if not any(map(_may_turn, parameters)):
        options = [option for option in options if not option[1]]
    if len({is_turned for _, is_turned in options}) > 1 and model_type in _IS_TURNED:
        options = [option for option in options if option[1] == _IS_TURNED[str(model_type)]]
    if len(options) != 1:
        _raise_unplaced(module, parameters, shapes, is_open=bool(options), where=where)
    [(order, is_turned)] = options
    return [
        LowRank(
            part.name,
            levels[at]["A"],
            levels[at]["B"],
            settings.scale(each.key, rank),
            is_turned and _may_turn(each),
            experts=each.experts,
            expert=part.expert,
            row=part.row,
        )
        for each, rank, at in zip(parameters, ranks, order, strict=True)
        for part in each.parts
    ]


def _raise_unplaced(
    module: str, parameters: Sequence[_Parameter], shapes: Sequence[Sequence[Shape]], *, is_open: bool, where: str
) -> None:
    found = f"{', '.join(map(str, shapes))} for {', '.join(f'{each.key} {list(each.shape)}' for each in parameters)}"
    if not is_open:
        raise UsageError(f"the factors of {module} do not fit its parameters", where=where, found=found)
    raise AmbiguousError(
        f"the factors of {module} fit its parameters in several ways",
        where=where,
        found=found,
        fix="Merge it with peft's merge_and_unload(); a model_type in config.json that is known here may decide.",
    )


def _may_turn(parameter: _Parameter) -> bool:
    return len(parameter.shape) == 3 and parameter.is_one_tensor


def _fits(parameter: _Parameter, rank: int, factors: Sequence[Shape], *, is_turned: bool) -> bool:
    """Return True if two factors' product has a parameter's shape."""
    rows, columns = parameter.shape[-2:]
    if is_turned:
        rows, columns = columns, rows
    total = rank * parameter.experts
    return rank > 0 and factors[0] == (total, columns) and factors[1] == (rows, total)


def _find_parameters(module: str, ends: NameEnds, base: Mapping[str, Shape], where: str) -> list[_Parameter]:
    """Return a module's parameters with names that end so."""
    found: dict[str, _Parameter] = {}
    for key in ends.list_keys(module):
        last = key.rpartition(".")[2]
        stored = find_stored_name(key, base)
        if stored in base and len(base[stored]) in (2, 3):
            found[key] = _Parameter(key, base[stored], (_StoredRows(stored, 0, 0),))
        elif last in _STACKED and (stacked := _find_stacked(module, last, base, where)):
            found[key] = stacked
    return list(found.values())


def _find_stacked(module: str, last: str, base: Mapping[str, Shape], where: str) -> _Parameter | None:
    """Return a parameter of which the base has each expert's weights."""
    places = [module, *(module.replace(*pair) for pair in _MODULES if pair[0] in module)]
    for place in places:
        for names in _STACKED[last]:
            if f"{place}.0.{names[0]}.weight" in base:
                return _stack(f"{module}.{last}", place, names, base, where)
    return None


def _stack(key: str, place: str, names: Sequence[str], base: Mapping[str, Shape], where: str) -> _Parameter:
    parts: list[_StoredRows] = []
    shapes: set[tuple[Shape, ...]] = set()
    experts = 0
    while f"{place}.{experts}.{names[0]}.weight" in base:
        row = 0
        weights = [f"{place}.{experts}.{name}.weight" for name in names]
        for weight in weights:
            parts.append(_StoredRows(weight, experts, row))
            row += base.get(weight, (0,))[0]
        shapes.add(tuple(base.get(weight, ()) for weight in weights))
        experts += 1
    [first, *others] = shapes
    if others or any(len(shape) != 2 or shape[1] != first[0][1] for shape in first):
        raise UsageError(
            f"the experts of {key} must have equal shapes", where=where, found=", ".join(map(str, sorted(shapes)))
        )
    return _Parameter(key, (experts, row, first[0][1]), tuple(parts))
