"""Small checkpoints, and ways to spoil them."""

import json
from pathlib import Path

import numpy as np

from msds.checkpoint import Entry, tensor_source, write_checkpoint

SHAPES = {"a.weight": (6, 4), "b.weight": (3, 8), "c.weight": (5,)}
ENTRIES = [Entry(name.removesuffix(".weight"), (name,), shape) for name, shape in SHAPES.items()]
INDEX = "model.safetensors.index.json"


def values(name):
    """Distinct values for each tensor of SHAPES."""
    shape = SHAPES[name]
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + 100 * ord(name[0])


def shard(number):
    return f"model-{number:05d}-of-00003.safetensors"


def three_shards(folder: Path) -> Path:
    """a, b and c in a shard each, with an index."""
    write_checkpoint(folder, [tensor_source(name, values(name)) for name in SHAPES], max_shard_bytes=1)
    return folder


def header(**entries):
    """A header with these tensor entries, as the bytes of a file without tensors."""
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text


def edit_header(path, change):
    """Rewrites the header of a file after `change(dict)`; the tensors' bytes stay."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    entries = json.loads(content[8 : 8 + length])
    change(entries)
    text = json.dumps(entries).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


def edit_index(folder, change):
    path = folder / INDEX
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))
