"""Target `vllm-sharded`: files for each tensor-parallel rank, for vLLM's `--load-format sharded_state`."""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping

from shardckpt.boxes import Box, Shape
from shardckpt.dtypes import SAFETENSORS_NAMES, array_nbytes
from shardckpt.encodings.safetensors import looks_like_safetensors
from shardckpt.errors import UsageError
from shardckpt.manifest import TensorEntry
from shardckpt.offline.select.options import VLLM_SHARDED, Options
from shardckpt.offline.select.selection import Selection
from shardckpt.offline.targets.base import CONFIG_FILES, FRESH, Conversion, Target, encode_json
from shardckpt.offline.targets.safetensors_files import build_file
from shardckpt.offline.write.conversion import Layout, PlannedFiles
from shardckpt.plan.layout.output_files import OutputTensor, PlannedFile
from shardckpt.plan.naming.model_files import CONFIG
from shardckpt.plan.rules.rules import Recipe, apply_recipe, iter_sources
from shardckpt.plan.vllm_shards import Parameter, list_scales, plan_rank
from shardckpt.storage.replaceable import FolderKind


class _Constant:
    """Yields one element for all values in a tensor that no file contains."""

    def __init__(self, element: bytes) -> None:
        self._element = element

    def __call__(self, box: Box, data: memoryview, stored: str) -> tuple[memoryview, str]:  # noqa: ARG002
        """Return the element for each position in a box."""
        return memoryview(self._element * box.volume), stored


def check(options: Options) -> None:
    """Check options that need no checkpoint."""
    if options.tp < 1:
        raise UsageError(
            f"--to {VLLM_SHARDED} needs the number of ranks",
            found=str(options.tp),
            fix="Pass --tp N to consolidate or convert; an adapter is merged into a safetensors folder first.",
        )
    if options.part != "model":
        raise UsageError("vLLM loads a model only", found=f"--part {options.part}", expected="--part model")


def plan(conversion: Conversion) -> PlannedFiles:
    """Plan all ranks' files."""
    selection, config = conversion.selection, conversion.config.config
    if not config:
        raise UsageError(
            f"vLLM needs the model's {CONFIG}",
            where=conversion.reader.store.url,
            fix="Name its folder with --config-from.",
        )
    computed = [tensor.name for tensor in selection.model if tensor.change is not None]
    if computed:
        raise UsageError(
            f"{computed[0]} cannot be computed and split at once",
            fix="First write a safetensors folder: leave out --to and --tp. Then: shardckpt convert THAT DST"
            f" --to {VLLM_SHARDED} --tp {conversion.options.tp}.",
        )
    tp = conversion.options.tp
    ranks = [conversion.split_tensors(_plan_tensors(selection, config, rank, tp)) for rank in range(tp)]

    def build_layout(unique_suffix: str, _: str) -> Layout:
        mark = f"-{unique_suffix}" if unique_suffix else ""
        payload = tuple(
            build_file(PlannedFile(f"model-rank-{rank}-part-{part}{mark}.safetensors", tensors), {"format": "pt"})
            for rank, parts in enumerate(ranks)
            for part, tensors in enumerate(parts)
        )
        small = conversion.encode_config()
        return Layout(payload, {**small, CONFIG: small.get(CONFIG) or encode_json(config)})

    nbytes = sum(tensor.nbytes for parts in ranks for tensors in parts for tensor in tensors)
    return PlannedFiles(_KIND, CONFIG, build_layout, nbytes)


def _plan_tensors(selection: Selection, config: Mapping[str, object], rank: int, tp: int) -> list[OutputTensor]:
    tensors = {tensor.name: tensor for tensor in selection.model}
    tensors |= {name: tensors[kept] for name, kept in selection.ties.items() if kept in tensors}
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    entries = {name: tensor.entry for name, tensor in tensors.items()}
    planned = plan_rank(config, shapes, rank, tp, ties=selection.ties)
    scale = struct.pack("<f", 1.0)
    return [
        *(
            _build_tensor(name, parameter, entries, _find_dtype(name, parameter.recipe, tensors))
            for name, parameter in planned.items()
        ),
        *(_build_constant(name, (), "float32", "float32", scale) for name in list_scales(config)),
    ]


def _build_tensor(name: str, parameter: Parameter, entries: Mapping[str, TensorEntry], dtype: str) -> OutputTensor:
    """Return a rank's tensor, as boxes in the model's tensors."""
    entry = apply_recipe(parameter.recipe, name, entries)
    rows = OutputTensor(name, entry, dtype)
    if not parameter.padding:
        return rows
    shape = (parameter.padding, *entry.shape[1:])
    zeros = _build_constant(name, shape, entry.stored, dtype, bytes(array_nbytes(entry.stored, (1,))))
    full = TensorEntry((name,), (entry.shape[0] + parameter.padding, *entry.shape[1:]), entry.stored, ())
    return OutputTensor(name, full, dtype, members=(rows, zeros))


def _build_constant(name: str, shape: Shape, stored: str, dtype: str, element: bytes) -> OutputTensor:
    return OutputTensor(name, TensorEntry((name,), shape, stored, ()), dtype, change=_Constant(element))


def _find_dtype(name: str, recipe: Recipe, tensors: Mapping[str, OutputTensor]) -> str:
    """Return the dtype for all parts of a tensor."""
    dtypes = {tensors[leaf.name].dtype for leaf in iter_sources(recipe)}
    if len(dtypes) > 1:
        raise UsageError(
            "parts of a tensor have several types",
            where=name,
            found=", ".join(sorted(dtypes)),
            fix="Cast all of them: --dtype.",
        )
    return dtypes.pop()


_KIND = FolderKind(
    "one checkpoint for vLLM's sharded_state loader",
    payload=re.compile(rf"model-rank-\d+-part-\d+{FRESH}\.safetensors"),
    other_names=CONFIG_FILES,
    is_one=looks_like_safetensors,
)
TARGET = Target(
    name=VLLM_SHARDED,
    title="a checkpoint for vLLM's sharded_state loader",
    files="`model-rank-{rank}-part-{n}.safetensors` for each of `--tp N` ranks, `config.json`",
    read_by="vLLM with `--load-format sharded_state` ([serving](serving.md))",
    plan=plan,
    holds_dtype=SAFETENSORS_NAMES.__contains__,
    check=check,
    keeps_config=True,
)
