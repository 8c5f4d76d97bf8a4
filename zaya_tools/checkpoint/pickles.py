"""Reads pickles that nobody vouches for: plain values, tensors as references to their bytes, and nothing that runs.

A pickle is a program whose instructions may call what they name. Here every name is looked up in a list of our own,
and what it finds are stand-ins defined below: nothing that a pickle names is ever imported, let alone called.
"""

from __future__ import annotations

import io
import pickle
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from zaya_tools.errors import SourceError


class _Fixed:
    """What a pickle gets to hold and must not change afterwards."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        raise TypeError("this has no state to set")


@dataclass(frozen=True, eq=False)
class Storage(_Fixed):
    """Bytes that tensors view: record `key` of the file; `dtype` is a safetensors type, or torch's name of another."""

    key: str
    dtype: str


@dataclass(frozen=True, eq=False)
class StoredTensor(_Fixed):
    """A tensor of a pickle: `offset` and `strides` count elements of its storage."""

    storage: Storage
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Record:
    """Stands in for an instance of a class that is known to hold plain values: what it was made of, and its state."""

    kind: ClassVar[str] = ""

    def __init__(self, *args: Any, **fields: Any) -> None:
        self.args: tuple[Any, ...] = args
        self.state: Any = fields

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __repr__(self) -> str:
        return f"<{self.kind}>"

    def fields(self) -> Mapping[str, Any]:
        """The attributes by name; empty where the state is something else."""
        return self.state if isinstance(self.state, dict) else {}


class _Dict(dict[Any, Any]):
    """Stands in for ordered and default dictionaries; takes the attributes that a module's state dict has."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*(arg for arg in args if isinstance(arg, list | dict)))


class _Function(_Fixed):
    """Stands in for a function. Made anew for every use, so that a pickle cannot change what others will call."""

    __slots__ = ("_run",)

    def __init__(self, run: Callable[..., Any]) -> None:
        self._run = run

    def __call__(self, *args: Any) -> Any:
        return self._run(*args)


_TYPES = {
    "Float": "F32", "Double": "F64", "Half": "F16", "BFloat16": "BF16", "Long": "I64", "Int": "I32", "Short": "I16",
    "Char": "I8", "Byte": "U8", "Bool": "BOOL", "Untyped": "U8",
}  # fmt: skip
_DTYPES = {
    "float32": "F32", "float": "F32", "float64": "F64", "double": "F64", "float16": "F16", "half": "F16",
    "bfloat16": "BF16", "int64": "I64", "long": "I64", "int32": "I32", "int": "I32", "int16": "I16", "short": "I16",
    "int8": "I8", "uint8": "U8", "bool": "BOOL", "uint16": "U16", "uint32": "U32", "uint64": "U64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0",
}  # fmt: skip
"""torch's dtypes by name, as safetensors names them."""


@dataclass(frozen=True)
class Dtype(_Fixed):
    """A torch dtype by its safetensors name, by torch's own where there is none."""

    name: str


@dataclass(frozen=True)
class _StorageType(_Fixed):
    dtype: str


def _whole(values: Any) -> tuple[int, ...]:
    result = tuple(values)
    if not all(isinstance(value, int) and value >= 0 for value in result):
        raise ValueError("sizes must be whole numbers")
    return result


def _tensor(storage: Any, offset: Any, shape: Any, strides: Any, *rest: Any) -> StoredTensor:
    """`torch._utils._rebuild_tensor_v2`, and v3, which says the dtype that storages have no class for."""
    dtype = next((entry.name for entry in rest if isinstance(entry, Dtype)), None)
    if not isinstance(storage, Storage):
        raise TypeError("a tensor without a storage")
    (start,) = _whole([offset])
    return StoredTensor(storage, dtype or storage.dtype, start, _whole(shape), _whole(strides))


def _parameter(tensor: Any, *_: Any) -> Any:
    return tensor


def _from_type(build: Any, kind: Any, args: Any, *_: Any) -> Any:
    """`torch._tensor._rebuild_from_type_v2`: a tensor with Python attributes, which are of no interest."""
    if not isinstance(build, _Function):
        raise TypeError("a tensor that is built by something else than a function")
    return build(*args)


def _encode(text: Any, encoding: Any = "latin1", *_: Any) -> bytes:
    """`_codecs.encode`, which is how protocol 2 spells bytes."""
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
        raise TypeError("only bytes are spelled like this")
    return text.encode("latin1")


_NUMBERS = {"b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8"}


def _scalar(dtype: Any, data: Any = b"", *_: Any) -> Any:
    """`numpy.core.multiarray.scalar`: a plain number, or a record of whatever else it is."""
    code = dtype.args[0] if isinstance(dtype, Record) and dtype.args else None
    if code not in _NUMBERS or not isinstance(data, bytes):
        return _record("numpy.generic")(dtype)
    big = isinstance(dtype.state, tuple) and ">" in dtype.state[1:2]
    return np.frombuffer(data, np.dtype(f"{'>' if big else '<'}{code}"))[0].item()


def _collection(kind: Callable[[Any], Any]) -> Callable[..., Any]:
    def make(values: Any = ()) -> Any:
        if not isinstance(values, list | tuple | set | frozenset | str | bytes):
            raise TypeError("a collection of something that is none")
        return kind(values)

    return make


def _record(kind: str) -> type[Record]:
    return type("Record", (Record,), {"kind": kind})


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._tensor._rebuild_from_type_v2": _from_type,
    "torch.Size": _collection(tuple),
    "torch.serialization._get_layout": lambda *_: None,
    "numpy.core.multiarray.scalar": _scalar,
    "numpy._core.multiarray.scalar": _scalar,
    "_codecs.encode": _encode,
    **{f"builtins.{kind.__name__}": _collection(kind) for kind in (set, frozenset, bytearray)},
}
_DICTS = {"collections.OrderedDict", "collections.defaultdict"}
_RECORDS = {
    "argparse.Namespace", "types.SimpleNamespace", "torch.device", "torch.Tensor", "torch.nn.parameter.Parameter",
    "_io.BytesIO", "io.BytesIO", "signal.Signals", "pathlib.Path", "pathlib.PosixPath", "pathlib.PurePosixPath",
    "pathlib._local.PosixPath", "numpy.dtype", "numpy.ndarray", "numpy.core.multiarray._reconstruct",
    "numpy._core.multiarray._reconstruct",
}  # fmt: skip
_RECORD_MODULES = (
    "megatron.", "primus.", "numpy.dtypes.", "torch.distributed.checkpoint.",
    "torch.distributed._shard.sharded_tensor.metadata.",
)  # fmt: skip
"""The trainers' own enums and records, and what describes a distributed checkpoint: kept, but never imported."""


class _Reader(pickle._Unpickler):
    """Python's own reader, with everything that could run taken out: names, persistent ids, extension codes.

    The one in Python, not the one in C: that takes a number in the pickle for the size of a table to allocate.
    """

    def __init__(self, data: bytes, where: str) -> None:
        super().__init__(io.BytesIO(data), encoding="utf-8")
        self._where = where
        self._records: dict[str, type] = {}

    def find_class(self, module: str, name: str) -> Any:
        # Protocol 2 writes the names of Python 2.
        module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
        full = f"{module}.{name}"
        if full in _FUNCTIONS:
            return _Function(_FUNCTIONS[full])
        if module in ("torch", "torch.storage") and name.endswith("Storage"):
            stem = name.removesuffix("Storage")
            return _StorageType(_TYPES.get(stem, stem))
        if module == "torch" and name in _DTYPES:
            return Dtype(_DTYPES[name])
        if full in self._records:
            return self._records[full]
        if full in _DICTS:
            made: type = type("Dict", (_Dict,), {})
        elif full in _RECORDS or full.startswith(_RECORD_MODULES):
            made = _record(full)
        else:
            raise SourceError(
                f"{self._where}: the pickle asks for {full}, which is neither tensor data nor a plain argument; "
                "nothing in it was run",
                "a state dict saved by itself, torch.save({'args': args, 'model': model.state_dict()}, file), is read",
            )
        self._records[full] = made
        return made

    def get_extension(self, code: int) -> Any:
        raise pickle.UnpicklingError(f"extension code {code}")

    def persistent_load(self, pid: Any) -> Storage:
        kind, storage_type, key = pid[:3]
        if kind != "storage" or not isinstance(storage_type, _StorageType) or not isinstance(key, str):
            raise pickle.UnpicklingError("a persistent id that is no storage")
        return Storage(key, storage_type.dtype)


def read_pickle(data: bytes, where: str) -> Any:
    """The values of a pickle; tensors are StoredTensor, objects are Record, numpy scalars are numbers.

    `where` names the file in errors. SourceError for a pickle that asks for anything else, naming it, and for one
    that is damaged.
    """
    try:
        return _Reader(data, where).load()
    except SourceError:
        raise
    except Exception as error:  # a damaged program can fail in any way; all of them mean the same
        raise SourceError(
            f"{where}: the pickle is damaged ({type(error).__name__}: {error})", "the file is damaged: copy it again"
        ) from error
