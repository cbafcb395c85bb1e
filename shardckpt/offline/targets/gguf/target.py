"""Target `gguf`: one file that llama.cpp loads."""

from __future__ import annotations

from shardckpt.encodings.gguf import TENSOR_TYPES, MetadataValue, encode_header, looks_like_gguf
from shardckpt.errors import UsageError
from shardckpt.offline.select.config_files import CONFIG
from shardckpt.offline.select.options import Options
from shardckpt.offline.targets.base import Conversion, Target
from shardckpt.offline.targets.gguf.architectures import Architecture, find_architecture
from shardckpt.offline.targets.gguf.hyperparameters import Hyperparameters, read_hyperparameters
from shardckpt.offline.targets.gguf.placement import PlacedTensor, most_common_type, place_tensors, write_data
from shardckpt.offline.targets.gguf.tokenizer import read_tokenizer
from shardckpt.offline.write.conversion import Layout, PlannedFiles
from shardckpt.offline.write.stream import FileSink, OutputFile, TensorStream
from shardckpt.storage.replaceable import FileKind

SUFFIX = ".gguf"
_FILE_TYPES = {"float32": 0, "float16": 1, "q8_0": 7, "bfloat16": 32}  # llama.cpp's number, by the commonest dtype

_QUANTIZATION_VERSION = 2


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
    tensors = place_tensors(conversion.selection, architecture, model, conversion.reader.store.url)
    tokenizer = read_tokenizer(conversion.config, model.sizes["vocabulary"])
    metadata = {**_general(architecture, tensors), **model.metadata, **tokenizer.metadata}
    header = encode_header(metadata, [tensor.header for tensor in tensors])

    def encode(stream: TensorStream, writer: FileSink) -> bytes:
        writer.write(header)
        write_data(tensors, stream, writer)
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


def _general(architecture: Architecture, tensors: tuple[PlacedTensor, ...]) -> dict[str, MetadataValue]:
    return {
        "general.architecture": architecture.name,
        "general.type": "model",
        "general.file_type": _FILE_TYPES[most_common_type(tensors)],
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
