"""Stubs for the classes and functions that pickles name, and the allow-list.

A pickle names `module.name` and then calls it. Here a name on the list below maps to a small pure function in this
module, or to an `InstanceStub` that stores the arguments. Any other class becomes an `InstanceStub` too: only its own
library can make its value. Names that can run code are rejected. Nothing is imported.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from shardckpt.errors import FormatError, UnsafeError, UnsupportedError

Builder = Callable[["Global", tuple[object, ...]], object]  # returns the stub for a call


@dataclass(frozen=True, slots=True)
class Dtype:
    """A torch dtype."""

    name: str  # name in torch, without `torch.`; may be unknown to `shardckpt.dtypes`


@dataclass(frozen=True, slots=True)
class StorageType:
    """A torch storage class."""

    dtype: str  # dtype of the counted elements; `uint8` for untyped storages


@dataclass(frozen=True, slots=True)
class TensorStub:
    """A tensor as a view of a storage."""

    storage: object  # what the caller's `persistent` returned
    offset: int  # elements from the start of the storage to the first element
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # elements between neighbors in each dimension
    dtype: str = ""  # empty for the storage's dtype
    bits: tuple[str, ...] = ()  # flags of a lazy view, `conj` or `neg`: its values differ from its bytes


class InstanceStub:
    """An instance that is not constructed: class, arguments and state."""

    __slots__ = ("args", "items", "name", "state")

    def __init__(
        self, name: str, args: tuple[object, ...] = (), state: object = None, items: list[object] | None = None
    ) -> None:
        self.name = name  # `module.name` of the class
        self.args = args  # positional arguments for the constructor
        self.state = state  # argument for `__setstate__`
        # Items for a subclass of list or set; keys and values in turn for a subclass of dict.
        self.items = items

    @property
    def parts(self) -> tuple[object, ...]:
        """Arguments, state and items, without empty ones."""
        return tuple(part for part in (self.args, self.state, self.items) if part is not None and part != ())

    def __repr__(self) -> str:
        return f"<{self.name}>"


class PerRankValue:
    """A value that differs between ranks' files; using it is an error."""

    __slots__ = ("file", "other")

    def __init__(self, file: str, other: str) -> None:
        self.file = file
        self.other = other

    def __repr__(self) -> str:
        return f"<other values in {self.file} than in {self.other}>"

    def error(self, name: str) -> UnsupportedError:
        """Return the error for using the value under a dotted name."""
        return UnsupportedError(
            f"{name!r} differs between ranks, and nothing says which value to take",
            found=f"other values in {self.file} than in {self.other}",
            fix="Read the file of one rank, or make the values equal before the save.",
        )


class Ordered(dict[object, object]):
    """A `collections.OrderedDict` or a similar class."""

    __slots__ = ("attributes",)

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        # Attributes of the dict object itself, such as `_metadata` in a module's state dict.
        self.attributes: object = None


class Global(NamedTuple):
    """A name on the allow-list, or another class."""

    name: str  # `module.name`
    call: Builder | None  # None if the name must not be called
    copied: int = 0  # cost in bytes of a call, for each value or character in its arguments
    # Returns the values that a call hashes, so that they can be checked first.
    hashed: Callable[[tuple[object, ...]], list[object]] | None = None
    is_listed: bool = True


@dataclass(frozen=True, slots=True)
class Allowed:
    """Names that pickles may use."""

    names: dict[tuple[str, str], object] = field(default_factory=dict)  # `(module, name)` to stub

    def find(self, module: str, name: str) -> object | None:
        """Return a name's stub; None if it is not on the list."""
        return self.names.get((module, name))


# Any number of keys of these types is allowed: they hash by identity or with this process's secret.
PLAIN_KEYS: frozenset[type] = frozenset({str, bytes, bool, type(None), Dtype, StorageType, Global, InstanceStub})


NEVER_RUN = "Nothing in a checkpoint is executed here; ask its author for plain tensors (safetensors)."


def malformed(what: Global, args: tuple[object, ...]) -> FormatError:
    """Return the error for an allowed call with arguments that no writer uses."""
    kinds = ", ".join(type(a).__name__ for a in args[:8])
    return FormatError(f"the pickle calls {what.name} in a way that no writer does", found=f"arguments ({kinds})")


def make_stub(what: Global, args: tuple[object, ...]) -> InstanceStub:
    """Return the stub for an instance with these arguments."""
    return InstanceStub(what.name, args)


def make_unlisted(module: str, name: str) -> Global:
    """Return the stub for a class or function that is not on the allow-list."""
    full = f"{module[:_MAX_CHARACTERS]}.{name[:_MAX_CHARACTERS]}"
    if len(full) > _MAX_CHARACTERS or not all(map(str.isidentifier, full.split("."))):
        raise UnsafeError(f"the pickle names {full}, which is not a Python name", fix=NEVER_RUN)
    is_error = module in ("builtins", "exceptions") and name in _ERRORS
    if not is_error and (module.partition(".")[0] in _RUNS_CODE or full.startswith(_RUN_CODE_IN_TORCH)):
        raise UnsafeError(f"the pickle names {full}, which can run code", fix=NEVER_RUN)
    return Global(full, make_stub, is_listed=False)


def _make_ordered(what: Global, args: tuple[object, ...]) -> object:
    if not args:
        return Ordered()
    pairs = args[0]
    if len(args) != 1 or not isinstance(pairs, list | tuple | dict):
        raise malformed(what, args)
    if isinstance(pairs, dict):
        return Ordered(pairs)
    if not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):
        raise malformed(what, args)
    return Ordered([tuple(pair) for pair in pairs])


def _default_dict(what: Global, args: tuple[object, ...]) -> object:
    if len(args) > 1:
        return _make_ordered(what, args[1:])
    return Ordered()


def _sequence(make: Callable[[list[object]], object]) -> Builder:
    def build(what: Global, args: tuple[object, ...]) -> object:
        if not args:
            return make([])
        if len(args) != 1 or not isinstance(args[0], list | tuple):
            raise malformed(what, args)
        return make(list(args[0]))

    return build


def _hash_builder(make: Callable[[list[object]], object]) -> Builder:
    """Return a builder for sets of plain values: hashing a hostile pickle's nested values could take forever."""

    def build(what: Global, args: tuple[object, ...]) -> object:
        items = args[0] if args else []
        if len(args) > 1 or not isinstance(items, list | tuple):
            raise malformed(what, args)
        return make(list(items))

    return build


def _deque(what: Global, args: tuple[object, ...]) -> object:
    if args and not isinstance(args[0], list | tuple):
        raise malformed(what, args)
    return list(args[0]) if args and isinstance(args[0], list | tuple) else []


def _bytes(what: Global, args: tuple[object, ...]) -> object:
    """Return what `bytes` or `bytearray` builds. Rejects a length as argument, which could allocate any amount."""
    if not args:
        return b""
    first = args[0]
    if isinstance(first, str) and len(args) == 2 and args[1] in ("latin1", "latin-1", "utf-8", "utf8", "ascii"):
        return first.encode("latin-1" if str(args[1]).startswith("latin") else "utf-8")
    if isinstance(first, bytes | bytearray) and len(args) == 1:
        return bytes(first)
    if isinstance(first, list) and len(args) == 1 and all(isinstance(b, int) and 0 <= b < 256 for b in first):
        return bytes(first)
    raise malformed(what, args)


def _encode(what: Global, args: tuple[object, ...]) -> object:
    """Return the bytes from `_codecs.encode`, which protocol 2 uses to write bytes."""
    if len(args) != 2 or not isinstance(args[0], str):
        raise malformed(what, args)
    return _bytes(what, args)


def _complex(what: Global, args: tuple[object, ...]) -> object:
    if len(args) == 2 and isinstance(args[0], int | float) and isinstance(args[1], int | float):
        return complex(args[0], args[1])
    raise malformed(what, args)


def _number(make: Callable[[], object]) -> Builder:
    def build(what: Global, args: tuple[object, ...]) -> object:
        if not args:
            return make()
        if len(args) != 1 or not isinstance(args[0], int | float):
            raise malformed(what, args)
        return args[0]

    return build


def _path(what: Global, args: tuple[object, ...]) -> object:
    if not all(isinstance(a, str) for a in args):
        raise malformed(what, args)
    parts = [str(a) for a in args]
    is_windows = "Windows" in what.name
    separator = "\\" if is_windows else "/"
    if is_windows:  # Python 3.13 stores the text that the path was made from
        parts = [part.replace("/", separator) for part in parts]
    root = parts.pop(0) if parts and parts[0].endswith(separator) else ""
    return root + separator.join(parts)


def _device(what: Global, args: tuple[object, ...]) -> object:
    if not args or not isinstance(args[0], str) or len(args) > 2 or not (len(args) == 1 or _is_small(args[1])):
        raise malformed(what, args)
    return args[0] if len(args) == 1 else f"{args[0]}:{args[1]}"


def _is_small(value: object) -> bool:
    return isinstance(value, int) and abs(value) < 1 << 31


def _text(what: Global, args: tuple[object, ...]) -> object:
    if len(args) != 1 or not isinstance(args[0], str):
        raise malformed(what, args)
    return args[0]


def _sizes(what: Global, args: tuple[object, ...], value: object) -> tuple[int, ...]:
    """Return non-negative 64-bit sizes, the only ones that torch supports."""
    if not isinstance(value, list | tuple) or len(value) > _MAX_DIMS:
        raise malformed(what, args)
    for n in value:
        if type(n) is not int or not 0 <= n < 2**63:
            raise malformed(what, args)
    return tuple(value)


def make_size(what: Global, args: tuple[object, ...]) -> object:
    """Return a `torch.Size` as a tuple."""
    if not args:
        return ()
    if len(args) == 1 and type(args[0]) is tuple and len(args[0]) <= _MAX_DIMS:
        for n in args[0]:
            if type(n) is not int:
                break
        else:
            return args[0]
    raise malformed(what, args)


def _tensor(what: Global, args: tuple[object, ...]) -> object:
    """Return the stub for `_rebuild_tensor` and its versions 2 and 3."""
    v3 = what.name.endswith("_v3")
    if len(args) < 4 or type(args[1]) is not int or not 0 <= args[1] < 2**63:
        raise malformed(what, args)
    shape, strides = _sizes(what, args, args[2]), _sizes(what, args, args[3])
    if len(shape) != len(strides):
        raise malformed(what, args)
    dtype = ""
    if v3:
        if len(args) < 7 or not isinstance(args[6], Dtype):
            raise malformed(what, args)
        dtype = args[6].name
    flags = args[7 if v3 else 6] if len(args) > (7 if v3 else 6) else None
    if not flags:
        return TensorStub(args[0], args[1], shape, strides, dtype)
    if not isinstance(flags, dict) or len(flags) > _MAX_FLAGS:
        raise malformed(what, args)
    return TensorStub(args[0], args[1], shape, strides, dtype, tuple(str(k) for k, v in flags.items() if v))


def _inner(what: Global, args: tuple[object, ...]) -> object:
    """Return a parameter's tensor."""
    if not args:
        raise malformed(what, args)
    return args[0]


def _make_typed(what: Global, args: tuple[object, ...]) -> object:
    """Return the tensor from `_rebuild_from_type_v2(function, class, args, state)`."""
    if len(args) != 4 or not isinstance(args[0], Global) or not isinstance(args[2], tuple):
        raise malformed(what, args)
    function, kind, inner, state = args
    assert isinstance(function, Global) and isinstance(inner, tuple)
    if function.call is None or function.copied:  # functions that copy are counted in their own calls
        raise malformed(what, args)
    made = function.call(function, inner)
    if isinstance(made, InstanceStub):
        made.state = state
    elif not isinstance(kind, Global) or kind.name not in _PLAIN_TENSORS:
        name = kind.name if isinstance(kind, Global) else "a tensor subclass"
        return InstanceStub(name, (made,), state)
    return made


def _wrapper(what: Global, args: tuple[object, ...]) -> object:
    """Return the stub for `_rebuild_wrapper_subclass(class, ...)`, with its class."""
    if not args or not isinstance(args[0], Global) or len(args) > _MAX_DIMS:
        raise malformed(what, args)
    return InstanceStub(args[0].name, args[1:])


def _reconstructor(what: Global, args: tuple[object, ...]) -> object:
    """Return the stub for `copyreg._reconstructor`, used by protocols 0 and 1."""
    if len(args) != 3 or not isinstance(args[0], Global) or args[0].call is not make_stub:
        raise malformed(what, args)
    return InstanceStub(args[0].name, () if args[2] is None else (args[2],))


def _nested_class(what: Global, args: tuple[object, ...]) -> object:
    """Return the stub for `getattr`: for the one nested class that torch pickles so, and for unlisted classes."""
    if len(args) == 2 and isinstance(args[0], Global) and isinstance(args[1], str):
        if (args[0].name, args[1]) == _NESTED:
            return Global(".".join(_NESTED), make_stub)
        if not args[0].is_listed:
            return make_unlisted(args[0].name, args[1])
    if len(args) == 2 and isinstance(args[0], InstanceStub):
        return InstanceStub(what.name, args)  # an instance's method
    raise UnsafeError(f"the pickle calls {what.name}, which could reach any function", found=args[1:], fix=NEVER_RUN)


_MAX_DIMS = 64
_MAX_FLAGS = 8
_MAX_CHARACTERS = 256  # characters of an unlisted name

_ERRORS = frozenset(
    name for name, kind in vars(builtins).items() if isinstance(kind, type) and issubclass(kind, BaseException)
)
# Modules that run code or programs, or reach files and networks: a pickle that names them does harm.
_RUNS_CODE = frozenset(
    {
        *("__builtin__", "builtins", "exceptions", "types", "importlib", "pkgutil", "runpy", "zipimport", "pip"),
        *("_io", "io", "nt", "ntpath", "os", "posix", "posixpath", "shutil", "linecache", "codecs", "sys", "urllib"),
        *("_posixsubprocess", "subprocess", "popen2", "pty", "multiprocessing", "asyncio", "socket", "signal"),
        *("webbrowser", "bdb", "cProfile", "codeop", "ctypes", "marshal", "pdb", "timeit"),
        *("_pickle", "cPickle", "pickle", "shelve"),
    }
)

_RUN_CODE_IN_TORCH = (
    *("torch.load", "torch.hub.", "torch.serialization.", "torch.package.", "torch.utils.cpp_extension."),
    *("torch._utils._import_dotted_name", "torch._inductor.", "torch.jit.", "torch.ops.", "torch.classes."),
)
_SHARDED_TENSOR = "torch.distributed._shard.sharded_tensor.api.ShardedTensor"
_NESTED = (_SHARDED_TENSOR, "ProcessGroupState")
_PLAIN_TENSORS = frozenset(
    {"torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer", "torch.nn.Parameter"}
)

_STORAGES = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Byte": "uint8",
    "Char": "int8",
    "Short": "int16",
    "Int": "int32",
    "Long": "int64",
    "Bool": "bool",
    "ComplexFloat": "complex64",
    "ComplexDouble": "complex128",
    "QUInt8": "quint8",
    "QInt8": "qint8",
    "QInt32": "qint32",
    "QUInt4x2": "quint4x2",
    "QUInt2x4": "quint2x4",
}
_DTYPES = (
    *("bool", "bfloat16", "float16", "float32", "float64"),
    *("complex32", "bcomplex32", "complex64", "complex128"),
    *(f"{kind}{n}" for kind in ("int", "uint") for n in (*range(1, 9), 16, 32, 64)),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
    *("quint8", "qint8", "qint32", "quint4x2", "quint2x4"),
    *("bits8", "bits16", "bits1x8", "bits2x4", "bits4x2"),
)

_FUNCTIONS: dict[str, dict[str, Builder | None]] = {
    "builtins": {
        "bytearray": _bytes,
        "bytes": _bytes,
        "complex": _complex,
        "dict": _make_ordered,
        "float": _number(float),
        "frozenset": _hash_builder(frozenset),
        "getattr": _nested_class,
        "int": _number(int),
        "list": _sequence(list),
        "long": _number(int),
        "object": None,
        "range": make_stub,
        "set": _hash_builder(set),
        "slice": make_stub,
        "str": None,
        "bool": None,
        "tuple": _sequence(tuple),
        "type": make_stub,
        "Ellipsis": None,
        "NotImplemented": None,
    },
    "_codecs": {"encode": _encode},
    "collections": {
        "Counter": _make_ordered,
        "OrderedDict": _make_ordered,
        "defaultdict": _default_dict,
        "deque": _deque,
    },
    "copyreg": {"_reconstructor": _reconstructor},
    "torch": {"Size": make_size, "device": _device, "Tensor": None},
    "torch.serialization": {"_get_layout": _text},
    "torch._utils": {
        "_rebuild_tensor": _tensor,
        "_rebuild_tensor_v2": _tensor,
        "_rebuild_tensor_v3": _tensor,
        "_rebuild_parameter": _inner,
        "_rebuild_parameter_with_state": _inner,
        "_rebuild_wrapper_subclass": _wrapper,
    },
    "torch._tensor": {"_rebuild_from_type_v2": _make_typed},
    "torch.nn.parameter": {"Parameter": None, "Buffer": None},
    **{
        module: dict.fromkeys(
            ("Path", "PosixPath", "PurePath", "PurePosixPath", "PureWindowsPath", "WindowsPath"), _path
        )
        for module in ("pathlib", "pathlib._local")
    },
}


def _pair_keys(args: tuple[object, ...]) -> list[object]:
    """Return the keys from the list of pairs that is a dict's last argument."""
    pairs = args[-1] if args else None
    return [p[0] for p in pairs if isinstance(p, list | tuple) and p] if isinstance(pairs, list | tuple) else []


def _items(args: tuple[object, ...]) -> list[object]:
    """Return the values in the set that a call creates."""
    return list(args[0]) if args and isinstance(args[0], list | tuple) else []


# Functions that return the values to be hashed.
_HASHED = {
    **dict.fromkeys(("dict", "Counter", "OrderedDict", "defaultdict"), _pair_keys),
    **dict.fromkeys(("frozenset", "set"), _items),
}

# Cost in bytes for each value or character in the arguments, which these calls copy.
_COPIED = {
    "getattr": 4 * _MAX_CHARACTERS,
    **dict.fromkeys(("dict", "Counter", "OrderedDict", "defaultdict"), 160),
    **dict.fromkeys(("frozenset", "set"), 128),
    **dict.fromkeys(("list", "tuple", "deque", "bytearray", "bytes", "encode"), 16),
    **dict.fromkeys(("Path", "PosixPath", "PurePath", "PurePosixPath", "PureWindowsPath", "WindowsPath"), 16),
}

_DCP_METADATA = (
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "TensorProperties",
    "TensorStorageMetadata",
    "_MEM_FORMAT_ENCODING",
)
_MULTIARRAY = ("_reconstruct", "scalar", "_frombuffer")
_STUBBED: dict[str, tuple[str, ...]] = {
    "_io": ("BytesIO",),
    "argparse": ("Namespace",),
    "types": ("SimpleNamespace",),
    "deepspeed.runtime.fp16.loss_scaler": ("DynamicLossScaler", "LossScaler"),
    "deepspeed.runtime.zero.config": (
        "DeepSpeedZeroConfig",
        "ZeroStageEnum",
    ),
    "deepspeed.runtime.zero.offload_config": (
        "DeepSpeedZeroOffloadOptimizerConfig",
        "DeepSpeedZeroOffloadParamConfig",
        "OffloadDeviceEnum",
    ),
    "deepspeed.utils.tensor_fragment": ("fragment_address",),
    "megatron.core.dist_checkpointing.strategies.torch": ("MCoreMetadata",),
    "megatron.core.enums": ("ModelType",),
    "megatron.core.transformer.enums": ("AttnBackend", "AttnMaskType", "LayerType"),
    "numpy": ("dtype", "ndarray", "bool_", "float32", "float64", "int32", "int64"),
    "numpy.core.multiarray": _MULTIARRAY,
    "numpy._core.multiarray": _MULTIARRAY,
    "numpy.core.numeric": ("_frombuffer",),
    "numpy._core.numeric": ("_frombuffer",),
    "torch": (
        "Generator",
        "channels_last",
        "contiguous_format",
        "per_channel_affine",
        "per_channel_affine_float_qparams",
        "per_channel_symmetric",
        "per_tensor_affine",
        "per_tensor_symmetric",
        "preserve_format",
        "strided",
    ),
    "torch._utils": (
        "_rebuild_device_tensor_from_cpu_tensor",
        "_rebuild_device_tensor_from_numpy",
        "_rebuild_meta_tensor_no_storage",
        "_rebuild_nested_tensor",
        "_rebuild_qtensor",
        "_rebuild_sparse_tensor",
        "_rebuild_xla_tensor",
    ),
    "torch._dynamo.decorators": ("_DimRange",),
    "torch.nested._internal.nested_tensor": ("NestedTensor", "_rebuild_njt"),
    "torch.storage": ("_load_from_bytes",),
    "torch.distributed._mesh_layout": ("_FlatLayout", "_MeshLayout"),
    "torch.distributed._shard.checkpoint.metadata": _DCP_METADATA,
    "torch.distributed._shard.metadata": ("ShardMetadata",),
    "torch.distributed._shard.sharded_tensor.api": ("ShardedTensor", "ShardedTensor.ProcessGroupState"),
    "torch.distributed._shard.sharded_tensor.metadata": (
        "MEM_FORMAT_ENCODING",
        "ShardedTensorMetadata",
        "TensorProperties",
    ),
    "torch.distributed._shard.sharded_tensor.shard": ("Shard",),
    "torch.distributed._shard.sharding_spec.api": ("EnumerableShardingSpec", "DevicePlacementSpec"),
    "torch.distributed._shard.sharding_spec.chunk_sharding_spec": ("ChunkShardingSpec",),
    "torch.distributed._tensor.api": ("DTensor",),
    "torch.distributed._tensor.device_mesh": ("DeviceMesh",),
    "torch.distributed._tensor.placement_types": (
        *("DTensorSpec", "Placement", "Replicate", "Shard", "TensorMeta", "_Partial", "Partial"),
    ),
    "torch.distributed.checkpoint._hf_utils": ("_HFStorageInfo",),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.metadata": _DCP_METADATA,
    "torch.distributed.device_mesh": ("DeviceMesh", "_MeshEnv"),
    "torch.distributed.fsdp._flat_param": ("FlatParamShardMetadata",),
    "torch.distributed.remote_device": ("_remote_device",),
    "torch.distributed.tensor": ("DTensor",),
    "torch.distributed.tensor._api": ("DTensor",),
    "torch.distributed.tensor._dtensor_spec": ("DTensorSpec", "ShardOrderEntry", "TensorMeta"),
    "torch.distributed.tensor.placement_types": (
        *("MaskPartial", "Partial", "Placement", "Replicate", "Shard", "_MaskPartial", "_StridedShard"),
    ),
}

# Python 2 module names, which protocols 0 to 2 still use.
_MODULE_SYNONYMS = {"__builtin__": "builtins", "copy_reg": "copyreg"}


def _default_names() -> dict[tuple[str, str], object]:
    names: dict[tuple[str, str], object] = {("torch", name): Dtype(name) for name in _DTYPES}
    for module in ("torch", "torch.cuda"):
        names |= {(module, f"{kind}Storage"): StorageType(dtype) for kind, dtype in _STORAGES.items()}
    for module, name in (("torch", "UntypedStorage"), ("torch.storage", "UntypedStorage")):
        names[module, name] = names[module, "_" + name] = StorageType("uint8")
    for module, members in _STUBBED.items():
        names |= {(module, name): Global(f"{module}.{name}", make_stub) for name in members}
    for module, functions in _FUNCTIONS.items():
        names |= {
            (module, name): Global(f"{module}.{name}", call, _COPIED.get(name, 0), _HASHED.get(name))
            for name, call in functions.items()
        }
    for old, module in _MODULE_SYNONYMS.items():
        names |= {(old, name): value for (m, name), value in names.items() if m == module}
    names["__builtin__", "unicode"] = names["builtins", "str"]
    return names


ALLOWED = Allowed(_default_names())
