"""MindSpore's `.ckpt`: protobuf messages one after the other, each a named tensor or a piece of one.

message Checkpoint { repeated Value value = 1; }
message Value { string tag = 1; TensorProto tensor = 2; MapTensorProto maptensor = 3; }
message TensorProto { repeated int64 dims = 1; string tensor_type = 2; bytes tensor_content = 3; }

A tensor of more than 512 MiB comes as several values of the same tag, whose contents follow each other. The checksum
that MindSpore may append is not compared.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from msds.checkpoint.dtypes import stored_type
from msds.errors import CheckpointError
from msds.layouts.stored import Extent, FileTensor
from msds.layouts.wire import Field, WireError, fields, integers, text

DTYPES = {
    "Float64": "float64",
    "Float32": "float32",
    "Float16": "float16",
    "BFloat16": "bfloat16",
    "Int64": "int64",
    "Int32": "int32",
    "Int16": "int16",
    "Int8": "int8",
    "UInt64": "uint64",
    "UInt32": "uint32",
    "UInt16": "uint16",
    "UInt8": "uint8",
    "Bool": "bool",
}
"""MindSpore's number types to ours."""

_CHECKSUM = b"crc_num"
_CHECKSUM_BYTES = 17


@dataclass
class _Tensor:
    kind: str
    dims: tuple[int, ...]
    extents: list[Extent] = field(default_factory=list)


def read_ckpt(path: Path) -> tuple[dict[str, FileTensor], dict[str, str]]:
    """The tensors of a file, and the names that are none (texts, hash tables) with the reason.

    CheckpointError names the file, and the tensor where one is at fault.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    try:
        found, others = _values(descriptor)
    except WireError as error:
        raise CheckpointError(
            f"{path} is not a readable MindSpore checkpoint ({error}): it is cut short, encrypted or another format"
        ) from None
    finally:
        os.close(descriptor)
    tensors = {}
    for name, value in found.items():
        if value.kind == "str":
            others[name] = "a text"
        else:
            tensors[name] = _file_tensor(name, value, path)
    return tensors, others


def _values(descriptor: int) -> tuple[dict[str, _Tensor], dict[str, str]]:
    size = os.fstat(descriptor).st_size
    if size == 0:
        raise WireError("it is empty")
    if size > _CHECKSUM_BYTES and os.pread(descriptor, 7, size - _CHECKSUM_BYTES) == _CHECKSUM:
        size -= _CHECKSUM_BYTES
    found: dict[str, _Tensor] = {}
    others: dict[str, str] = {}
    for item in fields(descriptor, 0, size):
        if item.number != 1 or item.stretch is None:
            raise WireError(f"field {item.number} is not a tensor")
        tag, tensor = "", None
        for part in fields(descriptor, *item.stretch):
            if part.number == 1:
                tag = text(descriptor, part)
            elif part.number == 2:
                tensor = _tensor(descriptor, part)
        if tensor is None:
            others[tag] = "a hash table"
            continue
        if (known := found.setdefault(tag, tensor)) is not tensor:
            if (known.kind, known.dims) != (tensor.kind, tensor.dims):
                raise WireError(f"the pieces of {tag} differ in type or shape")
            known.extents += tensor.extents
    return found, others


def _tensor(descriptor: int, item: Field) -> _Tensor:
    if item.stretch is None:
        raise WireError("a tensor is not a message")
    kind, dims, extents = "", [], []
    for part in fields(descriptor, *item.stretch):
        if part.number == 1:
            dims += integers(descriptor, part)
        elif part.number == 2:
            kind = text(descriptor, part)
        elif part.number == 3 and part.stretch is not None:
            extents.append((part.stretch[0], part.stretch[1] - part.stretch[0]))
    return _Tensor(kind, tuple(dims), extents)


def _file_tensor(name: str, value: _Tensor, path: Path) -> FileTensor:
    if value.kind not in DTYPES:
        raise CheckpointError(
            f"{path}: tensor {name} {list(value.dims)} is stored as {value.kind!r}; known are {', '.join(DTYPES)}"
        )
    dtype = DTYPES[value.kind]
    have = sum(count for _, count in value.extents)
    shape = value.dims
    if shape == (0,) and have == stored_type(dtype).nbytes:  # how MindSpore writes a scalar
        shape = ()
    tensor = FileTensor(name, dtype, shape, path, tuple(value.extents))
    if tensor.nbytes != have or min(shape, default=0) < 0:
        raise CheckpointError(
            f"{path}: tensor {name} {dtype} {list(shape)} needs {tensor.nbytes} bytes, {have} are there"
        )
    return tensor
