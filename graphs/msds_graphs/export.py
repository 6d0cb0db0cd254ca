"""MINDIR: a step as a file that MindSpore runs without this package or any Python source.

The file holds the Parameters with the values they have when it is written. Read it back with
`nn.GraphCell(mindspore.load(path))`: it takes the batch leaves in flattening order, padded to the bucket, and
returns the output leaves in flattening order. Donated Parameters live on inside that cell.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mindspore as ms

from msds_graphs.errors import GraphError
from msds_graphs.faults import explain


def export_step(call: Callable[..., Any], tensors: Sequence[ms.Tensor], path: Path, name: str) -> Path:
    """Writes a jit function for these argument shapes; compiles it once more. Returns the `.mindir` path.

    GraphError when the folder does not exist or MindSpore cannot export the graph.
    """
    target = path if path.suffix == ".mindir" else path.with_name(path.name + ".mindir")
    if not target.parent.is_dir():
        raise GraphError(f"cannot export {name} to {target}: the folder {target.parent} does not exist")
    try:
        ms.export(call, *tensors, file_name=str(target), file_format="MINDIR")
    except Exception as error:
        raise explain(error, f"exporting {name} to {target}") from error
    return target
