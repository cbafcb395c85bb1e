"""Target `deepspeed-universal`: one folder per trained parameter.

DeepSpeed resumes from it on any topology, with `load_checkpoint`, `"checkpoint": {"load_universal": true}` and ZeRO
stages 1 to 3. `zero/` has float32 weights and the values that all parameters share; model files have the live weights,
buffers and ties.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from shardckpt.encodings.element_values import numpy_dtype
from shardckpt.encodings.tagged_json import NamedValue
from shardckpt.errors import UsageError
from shardckpt.manifest import UNREAD, unflatten
from shardckpt.offline.select.options import Options
from shardckpt.offline.select.selection import Selection, select
from shardckpt.offline.targets.base import Conversion, Target, require_allowed
from shardckpt.offline.targets.torch_archive import can_pickle
from shardckpt.offline.targets.torchsave import state_dict, torch_file
from shardckpt.offline.write.conversion import Layout, PlannedFiles
from shardckpt.plan.layout.output_files import OutputTensor
from shardckpt.plan.optim.optim_keys import GROUPS
from shardckpt.plan.optim.output_keys import VALUES
from shardckpt.reader import Reader
from shardckpt.readers.chunk_reader import read_blocks
from shardckpt.readers.torchsave.writer import TYPES, TensorValue, encode_archive
from shardckpt.storage.replaceable import FolderKind

LATEST = "latest_universal"
_ZERO, _WEIGHTS, _STEP = "zero", "fp32", "step"
_MASTER = "master"
_OLDEST_VERSION = "0.14.0"  # for sources from other frameworks: files are unchanged since then

# Training loop state that DeepSpeed restores, if the source is a DeepSpeed checkpoint.
_LOOP = ("lr_scheduler", "data_sampler", "random_ltd", "global_samples")


@dataclass(frozen=True, slots=True)
class _Param:
    weights: OutputTensor  # float32
    slots: Mapping[str, OutputTensor]
    step: OutputTensor | object  # array or value; None if unknown


# A torch file's path and value, and the tensors in its storages.
_PlannedFile = tuple[str, object, Sequence[OutputTensor]]


def plan(conversion: Conversion) -> PlannedFiles:
    """Plan a conversion's folder."""
    reader, selection, options = conversion.reader, conversion.selection, conversion.options
    weights = master_weights(reader, options, conversion.config.config, selection)
    params, lost = _params(selection, weights)
    require_allowed(lost, TARGET.title, allow_loss=options.allow_loss)
    steps = _steps(reader, params)
    folder = f"global_step{steps}_universal"
    files = [
        file for name, param in params.items() for file in _param_files(f"{folder}/{_ZERO}/{_folder_name(name)}", param)
    ]
    files.append((f"{folder}/{_ZERO}/optimizer_state.pt", *_optimizer_state(reader, selection, params)))
    fields = _model_fields(reader, selection, params, steps)
    model = {"module": state_dict(selection, selection.model), **fields}
    files.append((f"{folder}/mp_rank_00_model_states.pt", model, selection.model))
    small = {
        f"{folder}/zero_pp_rank_0_mp_rank_00_model_states.pt": encode_archive({"module": {}, **fields}),
        **{
            f"{folder}/{_ZERO}/{_folder_name(name)}/{_STEP}.pt": encode_archive(param.step)
            for name, param in params.items()
            if param.step is not None and not isinstance(param.step, OutputTensor)
        },
        LATEST: folder.encode(),
    }
    layout = Layout(tuple(torch_file(*file) for file in files), small)
    nbytes = sum(tensor.nbytes for _, _, tensors in files for tensor in tensors)
    return PlannedFiles(_KIND, LATEST, lambda *_: layout, nbytes)


def check(options: Options) -> None:
    """Reject options that do not apply."""
    if options.part != "all" or options.optim_keys != "names":
        raise UsageError(
            "a universal checkpoint holds model and optimizer, by name",
            found=f"--part {options.part}, --optim-keys {options.optim_keys}",
            fix="Give --part all.",
        )


def master_weights(
    reader: Reader, options: Options, config: Mapping[str, object], selection: Selection
) -> list[OutputTensor]:
    """Return the master weights: the optimizer's own copies if the source has them."""
    if not _trained_names(selection):
        raise UsageError(
            "a universal checkpoint is for resuming training, and the source has no optimizer",
            found="no trained parameter",
            expected="an optimizer with its param groups",
            fix="Name it with --optim-key; or write the weights alone, --to safetensors.",
        )
    found = selection.model
    if any(path[0] == _MASTER for path in reader.manifest.tensors):
        found = select(reader, replace(options, part="model", weights="master"), config).model
    known = {tensor.name: tensor for tensor in found}
    made = []
    for name in _trained_names(selection):
        tensor = known.get(name) or known.get(selection.ties.get(name, ""))
        if tensor is None:
            raise UsageError(f"the optimizer has {name!r}, which the model lacks", fix="Include it in the model, too.")
        made.append(OutputTensor(name, tensor.entry, "float32"))
    return made


def _trained_names(selection: Selection) -> list[str]:
    groups: Sequence[Mapping[str, Any]] = (selection.groups or {}).get(GROUPS, ())
    return [name for group in groups for name in group["params"]]


def _params(selection: Selection, weights: Sequence[OutputTensor]) -> tuple[dict[str, _Param], list[str]]:
    """Return the trained parameters by name, and descriptions for state that DeepSpeed would not load."""
    slots: dict[str, dict[str, OutputTensor]] = {}
    lost = []
    steps: dict[str, OutputTensor | object] = {}
    for tensor in selection.optim:
        name, _, slot = tensor.name.rpartition("/")
        if slot == _STEP and not tensor.shape:
            steps[name] = tensor
        else:
            slots.setdefault(name, {})[slot] = tensor
    for name, values in (selection.groups or {}).get(VALUES, {}).items():
        for slot, value in values.items():
            if slot == _STEP:
                steps[name] = value
            else:
                lost.append(f"{name}/{slot}, which is not a tensor")
    found = {tensor.name: _Param(tensor, {}, None) for tensor in weights}
    for name, param in found.items():
        mine = slots.pop(name, {})
        odd = [slot for slot, tensor in mine.items() if tensor.shape != param.weights.shape]
        lost += [f"{name}/{slot}, which is not shaped like its parameter" for slot in odd]
        kept = {slot: tensor for slot, tensor in mine.items() if slot not in odd}
        found[name] = replace(param, slots=kept, step=steps.get(name))
    lost += [f"{name}/{slot}, of a parameter in no group" for name, held in slots.items() for slot in held]
    _require_alike(selection, found)
    return found, lost


def _require_alike(selection: Selection, params: Mapping[str, _Param]) -> None:
    """Reject groups for which DeepSpeed could not fill one flat tensor for every slot."""
    for group in (selection.groups or {}).get(GROUPS, ()):
        slots = sorted({slot for name in group["params"] for slot in params[name].slots})
        for name in group["params"]:
            lacking = [slot for slot in slots if slot not in params[name].slots]
            if lacking:
                raise UsageError(
                    f"{name!r} has no {lacking[0]}, which others in its group have: DeepSpeed keeps both in one tensor",
                    fix="Remove it from the optimizer's group in training, and save again.",
                )


def _folder_name(name: str) -> str:
    if "/" in name or "\\" in name or "\0" in name or name in ("", ".", ".."):
        raise UsageError(f"{name!r} cannot be the name of a folder", fix="Rename it with --rename.")
    return name


def _param_files(folder: str, param: _Param) -> Iterator[_PlannedFile]:
    for slot, tensor in {_WEIGHTS: param.weights, **param.slots}.items():
        value = {"cat_dim": 0, "param": TensorValue(0, tensor.dtype, tensor.shape)}
        yield f"{folder}/{slot}.pt", value, [tensor]
    if isinstance(param.step, OutputTensor):
        yield f"{folder}/{_STEP}.pt", TensorValue(0, param.step.dtype, ()), [param.step]


def _optimizer_state(
    reader: Reader, selection: Selection, params: Mapping[str, _Param]
) -> tuple[object, Sequence[OutputTensor]]:
    """Return the values that all parameters share; ZeRO stage 3 also reads groups and steps from them."""
    steps = [param.step for param in params.values() if isinstance(param.step, OutputTensor)][:1]
    step = TensorValue(0, steps[0].dtype, ()) if steps else next((p.step for p in params.values()), None)
    given: Sequence[Mapping[str, Any]] = (selection.groups or {}).get(GROUPS, ())
    groups = [{**group, "params": [number]} for number, group in enumerate(given)]
    value = {
        "overflow": False,
        "ds_version": _version(reader),
        "param_groups": groups,
        "optimizer_state_dict": {
            "state": {number: {_STEP: step} for number in range(len(groups))},
            "param_groups": groups,
        },
    }
    return value, steps


def _model_fields(reader: Reader, selection: Selection, params: Mapping[str, _Param], steps: int) -> dict[str, object]:
    """Return a model file's fields in addition to the weights."""
    groups: Sequence[Mapping[str, Any]] = (selection.groups or {}).get(GROUPS, ())
    shapes = [{name: NamedValue("size", params[name].weights.shape) for name in group["params"]} for group in groups]
    return {
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": shapes,
        "frozen_param_shapes": None,
        "frozen_param_fragments": None,
        "shared_params": dict(selection.ties),
        **dict.fromkeys(("lr_scheduler", "data_sampler", "random_ltd")),
        "skipped_steps": 0,
        "global_steps": steps,
        **_loop(reader),
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_config": {},
        "ds_version": _version(reader),
        "universal_checkpoint_info": {"universal_checkpoint_version": 0.2},
    }


def _loop(reader: Reader) -> dict[str, object]:
    """Return the plain training loop state that DeepSpeed restores."""
    found: dict[str, object] = {}
    for key in _LOOP if reader.manifest.format.startswith("deepspeed") else ():
        below = {p[1:]: e.value for p, e in reader.manifest.objects.items() if p[0] == key}
        value = unflatten(below) if below and UNREAD not in below.values() else None
        if value is not None and can_pickle(value):
            found[key] = value
    return found


def _version(reader: Reader) -> str:
    entry = reader.manifest.objects.get(("ds_version",))
    return entry.value if entry is not None and isinstance(entry.value, str) else _OLDEST_VERSION


def _steps(reader: Reader, params: Mapping[str, _Param]) -> int:
    """Return the optimizer's step count."""
    entry = reader.manifest.objects.get(("global_steps",))
    if entry is not None and type(entry.value) is int:
        return entry.value
    for param in params.values():
        if isinstance(param.step, OutputTensor) and prod(param.step.shape) == 1:
            data = b"".join(read_blocks(reader, param.step.entry))
            return int(np.frombuffer(data, numpy_dtype(param.step.entry.stored))[0])
        if isinstance(param.step, int | float):
            return int(param.step)
    return 0


_KIND = FolderKind(
    "one universal checkpoint of DeepSpeed",
    payload=re.compile(r"global_step\d+_universal/(zero/([^/]+/)?[^/]+|[^/]+_model_states)\.pt"),
    other_names=re.compile(re.escape(LATEST)),
)
TARGET = Target(
    name="deepspeed-universal",
    title="a universal checkpoint",
    files="`zero/<parameter>/*.pt`, a model file and `latest_universal` ([from DeepSpeed](from-deepspeed.md))",
    read_by="DeepSpeed's `load_checkpoint`, at any stage and world size",
    plan=plan,
    holds_dtype=TYPES.__contains__,
    holds_value=can_pickle,
    check=check,
)
