"""Target `gguf`: one file that llama.cpp loads."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from shardckpt.boxes import Box
from shardckpt.dtypes import block_elements
from shardckpt.errors import IncompleteError, UnsupportedError, UsageError
from shardckpt.offline.select.options import Options
from shardckpt.offline.select.selection import Selection
from shardckpt.offline.targets.base import Conversion, Target
from shardckpt.offline.targets.gguf.gguf_header import (
    TENSOR_TYPES,
    GgufTensor,
    MetadataValue,
    encode_header,
    looks_like_gguf,
    padding,
)
from shardckpt.offline.targets.gguf.hyperparameters import (
    EMBEDDING,
    OUTPUT,
    Architecture,
    Hyperparameters,
    NamedTensor,
    find_architecture,
    read_hyperparameters,
)
from shardckpt.offline.targets.gguf.tokenizer import read_tokenizer
from shardckpt.offline.write.conversion import Layout, PlannedFiles
from shardckpt.offline.write.stream import FileSink, OutputFile, TensorPart, TensorStream
from shardckpt.plan.layout.output_files import OutputTensor
from shardckpt.plan.naming.model_files import CONFIG
from shardckpt.storage.replaceable import FileKind

SUFFIX = ".gguf"
_FILE_TYPES = {"float32": 0, "float16": 1, "q8_0": 7, "bfloat16": 32}  # llama.cpp's number, by the commonest dtype

_QUANTIZATION_VERSION = 2

_BUFFERS = (".rotary_emb.inv_freq",)  # buffers in older checkpoints, which llama.cpp computes

_SHOWN = 5


def plan(conversion: Conversion) -> PlannedFiles:
    """Plan a model's file."""
    if not conversion.is_file:
        raise UsageError("a GGUF checkpoint is one file", found=conversion.target, fix=f"End its name in {SUFFIX}.")
    if conversion.is_adapter:
        raise UsageError(
            "an adapter alone cannot be written as GGUF",
            fix="Merge it into its base: shardckpt merge-adapter --to gguf.",
        )
    architecture, model = _read_model(conversion)
    tensors = _place_tensors(conversion.selection, architecture, model, conversion.reader.store.url)
    tokenizer = read_tokenizer(conversion.config, model.sizes["vocabulary"])
    metadata = {**_general(architecture, tensors), **model.metadata, **tokenizer.metadata}
    header = encode_header(metadata, [tensor.header for tensor in tensors])

    def encode(stream: TensorStream, writer: FileSink) -> bytes:
        writer.write(header)
        _write_data(tensors, stream, writer)
        return b""

    file = OutputFile(conversion.file_name, len(header) + sum(t.padded_nbytes for t in tensors), len(tensors), encode)
    layout = Layout((file,), {})
    written = tuple(tensor.source for tensor in tensors if tensor.source is not None)
    return PlannedFiles(
        _FILE,
        "",
        lambda *_: layout,
        sum(tensor.nbytes for tensor in written),
        written=written,
        warnings=(*model.warnings, *tokenizer.warnings),
    )


def _read_model(conversion: Conversion) -> tuple[Architecture, Hyperparameters]:
    config = conversion.config
    if not config.config or config.store is None:
        raise UsageError(
            "GGUF needs the model's hyperparameters, and no config.json was found next to the source",
            where=conversion.reader.store.url,
            fix="Name the folder with its config.json: --config-from FOLDER (config_from=).",
        )
    where = f"{config.store.url}/{CONFIG}"
    architecture = find_architecture(config.config.get("model_type"), where)
    return architecture, read_hyperparameters(config.config, architecture, where)


def _general(architecture: Architecture, tensors: tuple[_PlacedTensor, ...]) -> dict[str, MetadataValue]:
    return {
        "general.architecture": architecture.name,
        "general.type": "model",
        "general.file_type": _FILE_TYPES[_most_common_type(tensors)],
        "general.quantization_version": _QUANTIZATION_VERSION,
    }


def check_options(options: Options) -> None:
    """Refuse optimizers, for which GGUF has no place. Raises UsageError."""
    if options.part != "model":
        raise UsageError("GGUF holds no optimizer", found=f"--part {options.part}", expected="--part model")


_FILE = FileKind("a GGUF file", looks_like_gguf)
TARGET = Target(
    name="gguf",
    title="a GGUF file",
    files="one file, `DST.gguf`; F32, F16, BF16 or Q8_0 ([llama.cpp](llama-cpp.md))",
    read_by="llama.cpp, Ollama",
    plan=plan,
    holds_dtype=TENSOR_TYPES.__contains__,
    suffixes=(SUFFIX,),
    check=check_options,
)


@dataclass(frozen=True, slots=True)
class _PlacedTensor:
    """A tensor in a file."""

    header: GgufTensor
    source: OutputTensor | None  # with the type to write; None if the data is known
    heads: int = 0  # whose rows are stored by pairs; 0 keeps the order
    data: bytes = b""

    @property
    def padded_nbytes(self) -> int:
        """Bytes of the data with its padding."""
        return self.header.nbytes + len(padding(self.header.nbytes))

    def iter_rows(self) -> Iterator[TensorPart]:
        """Yield each head's rows by pairs: row i in the first half, then row i in the second half."""
        # transformers rotates a head's element i with element i + half, llama.cpp (for llama) rotates neighbors.
        assert self.source is not None, "data that is known has no rows"
        rows, *rest = self.source.shape
        half = rows // self.heads // 2
        for first in range(0, rows, 2 * half):
            for row in range(first, first + half):
                for each in (row, row + half):
                    yield TensorPart(self.source, Box((each, *(0 for _ in rest)), (1, *rest)))


def _place_tensors(
    selection: Selection, architecture: Architecture, model: Hyperparameters, url: str
) -> tuple[_PlacedTensor, ...]:
    """Return a file's tensors in order."""
    stored = {tensor.name: tensor for tensor in selection.model}
    stored |= {name: stored[kept] for name, kept in selection.ties.items() if kept in stored}
    layers = min(model.layers, len(stored))  # more cannot be complete, and a config may name billions
    wanted = list(architecture.list_tensors(layers))
    _require_known(stored, wanted, architecture.name, url)
    embedding = stored.get(EMBEDDING.source)
    if stored.get(OUTPUT.source, embedding if model.is_tied else None) is embedding:
        wanted.remove(OUTPUT)
    missing = [each.source for each in wanted if each.is_required and each.source not in stored]
    if missing:
        raise IncompleteError(
            f"a tensor of the {architecture.name} architecture is missing",
            where=url,
            found=f"no {missing[0]}" + (f", and {len(missing) - 1} more" if len(missing) > 1 else ""),
            fix="Give this model's config.json, or the names in transformers with --rules or --rename.",
        )
    placed = [_place(each, stored[each.source], model) for each in wanted if each.source in stored]
    factors = model.list_rope_factors()
    if factors:
        data = struct.pack(f"<{len(factors)}f", *factors)
        header = GgufTensor("rope_freqs.weight", "float32", (len(factors),))
        placed.insert(0, _PlacedTensor(header, None, data=data))
    return tuple(placed)


def _require_known(stored: Mapping[str, OutputTensor], wanted: list[NamedTensor], architecture: str, url: str) -> None:
    known = {each.source for each in wanted}
    unknown = [name for name in stored if name not in known and not name.endswith(_BUFFERS)]
    if unknown:
        more = f" and {len(unknown) - _SHOWN} more" if len(unknown) > _SHOWN else ""
        raise UnsupportedError(
            f"{architecture}, the architecture in config.json, has no such tensor",
            where=url,
            found=", ".join(unknown[:_SHOWN]) + more,
            fix="Give this model's config.json, leave the tensor out with --exclude, or give the names in transformers"
            " with --rules or --rename.",
        )


def _place(named: NamedTensor, source: OutputTensor, model: Hyperparameters) -> _PlacedTensor:
    """Return a tensor with its type: llama.cpp requires vectors in float32."""
    shape = tuple(model.sizes[size] for size in named.shape)
    if source.shape != shape:
        raise UnsupportedError(
            f"the shape of {named.source} does not fit config.json", found=source.shape, expected=shape
        )
    written = replace(source, dtype="float32") if len(shape) == 1 else source
    block = block_elements(written.dtype)
    if shape[-1] % block:
        raise UsageError(
            f"{written.dtype} needs rows of full blocks, and {named.source} has others",
            found=f"rows of {shape[-1]}",
            expected=f"a multiple of {block}",
            fix="Choose --dtype f16, or keep such tensors with --keep-fp32 NAME.",
        )
    header = GgufTensor(named.name, written.dtype, shape)
    return _PlacedTensor(header, written, model.sizes[named.heads] if named.heads else 0)


def _most_common_type(tensors: tuple[_PlacedTensor, ...]) -> str:
    """Return the dtype that most matrices have."""
    return Counter(each.header.dtype for each in tensors if len(each.header.shape) > 1).most_common(1)[0][0]


def _write_data(tensors: tuple[_PlacedTensor, ...], stream: TensorStream, writer: FileSink) -> None:
    """Write all tensors' data, each with its padding; tensors that need none are written together."""
    together: list[OutputTensor] = []
    for tensor in tensors:
        zeros = padding(tensor.header.nbytes)
        if tensor.source is not None and not tensor.heads:
            together.append(tensor.source)
            if not zeros:
                continue
        stream.write_tensors(together, writer)
        together = []
        if tensor.source is None:
            writer.write(tensor.data)
        elif tensor.heads:
            stream.write_parts(tensor.iter_rows(), writer)
        writer.write(zeros)
    stream.write_tensors(together, writer)
