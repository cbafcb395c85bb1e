"""`--to torch`: files that `torch.load(weights_only=True)` reads, laid out to the byte and filled as a stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from shardckpt.format.reader import Reader
from shardckpt.format.torchsave.writer import ArchiveWriter, Storage, TensorValue, TorchArchive, lay_out
from shardckpt.manifest import Path, unflatten
from shardckpt.offline.select.selection import Selection
from shardckpt.offline.write.report import Meter
from shardckpt.offline.write.stream import MemoryBudget, iter_parts, write_parts
from shardckpt.plan.layout.output_files import OutputTensor, name_files
from shardckpt.plan.optim.output_keys import to_state_paths
from shardckpt.storage.store import Writer

SUFFIX = ".bin"
OPTIMIZER_FILE = "optimizer.bin"


@dataclass(frozen=True, slots=True)
class TorchFile:
    """A file of `torch.save`, decided.

    Attributes:
        name: In the target.
        archive: Where its bytes go.
        tensors: What its storages hold, in order.
    """

    name: str
    archive: TorchArchive
    tensors: tuple[OutputTensor, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole file."""
        return self.archive.nbytes

    @property
    def count(self) -> int:
        """Tensors in it; of tied ones, one."""
        return len(self.tensors)

    def write(
        self, reader: Reader, writer: Writer, *, budget: MemoryBudget, allow_overflow: bool, meter: Meter
    ) -> tuple[int, ...]:
        """Write it from start to end; the caller closes the writer.

        Raises:
            CheckpointError: The source's bytes cannot be read, or a cast overflows.
            StorageError: Reading or writing failed.
        """
        archive = ArchiveWriter(self.archive, writer.write)
        parts = iter_parts(self.tensors)
        write_parts(reader, parts, archive, budget=budget, allow_overflow=allow_overflow, meter=meter)
        archive.close()
        return ()


def model_files(
    selection: Selection, groups: Sequence[tuple[OutputTensor, ...]], stem: str, unique_suffix: str
) -> tuple[list[TorchFile], dict[str, object]]:
    """Return the files of a model, and the content of its index.

    Args:
        selection: What is written; tied names lie in one file, over one storage.
        groups: The tensors of each file.
        stem: `pytorch_model` or `adapter_model`.
        unique_suffix: Put into every name, where the usual ones may still be read by somebody.
    """
    named = name_files(groups, stem, unique_suffix, SUFFIX)
    files = [torch_file(file.name, state_dict(selection, file.tensors), file.tensors) for file in named]
    total = sum(t.nbytes for group in groups for t in group)
    weights = {name: f.name for f in named for name in state_dict(selection, f.tensors)}
    elements = sum(prod(t.shape) for group in groups for t in group)
    metadata = {"total_parameters": elements, "total_size": total}
    return files, {"metadata": metadata, "weight_map": dict(sorted(weights.items()))}


def optimizer_file(selection: Selection) -> TorchFile:
    """Return `optimizer.bin`: `{"state": {parameter: {slot: tensor}}, "param_groups": [...]}`."""
    return torch_file(OPTIMIZER_FILE, _optimizer(selection, 0), selection.optim)


def single_file(selection: Selection, part: str, name: str) -> TorchFile:
    """Return the one file that holds a part: the model's state dict, the optimizer's, or both under their keys."""
    if part == "optim":
        return torch_file(name, _optimizer(selection, 0), selection.optim)
    model: dict[str, object] = dict(state_dict(selection, selection.model))
    if selection.groups is None:
        return torch_file(name, model, selection.model)
    value = {"model": model, "optimizer": _optimizer(selection, len(selection.model))}
    return torch_file(name, value, (*selection.model, *selection.optim))


def torch_file(name: str, value: object, tensors: Sequence[OutputTensor]) -> TorchFile:
    """Return a file that holds a value.

    Args:
        name: In the target.
        value: What is saved, with a `TensorValue` for each tensor.
        tensors: What its storages hold, in the order of their numbers.
    """
    storages = [Storage(t.dtype, prod(t.shape)) for t in tensors]
    return TorchFile(name, lay_out(value, storages), tuple(tensors))


def state_dict(selection: Selection, tensors: Sequence[OutputTensor]) -> dict[str, TensorValue]:
    """Return names to tensors in state-dict order, both names of a tied pair; storages are numbered as given."""
    numbers = {tensor.name: number for number, tensor in enumerate(tensors)}
    order = selection.order or tuple(numbers)
    found = {}
    for name in (*order, *numbers):
        number = numbers.get(selection.ties.get(name, name))
        if number is not None and name not in found:
            found[name] = TensorValue(number, tensors[number].dtype, tensors[number].shape)
    return found


def _optimizer(selection: Selection, first: int) -> dict[str | int, object]:
    """Return the optimizer's nest.

    Args:
        selection: What is written.
        first: Number of the storage of its first tensor.
    """
    content: Mapping[str, Any] = selection.groups or {}
    arrays, values = to_state_paths(selection.optim, content)
    leaves: dict[Path, object] = {
        path: TensorValue(first + number, tensor.dtype, tensor.shape)
        for number, (path, tensor) in enumerate(arrays.items())
    }
    tree: dict[str | int, object] = unflatten({**leaves, **values})
    return tree
