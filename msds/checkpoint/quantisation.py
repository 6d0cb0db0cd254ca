"""Block-scaled float8 weights, as DeepSeek-V3 stores them: one float32 scale per block of a weight.

The weight [R, C] has a grid of scales [ceil(R / block rows), ceil(C / block columns)]; the last row and
column of blocks may be partial. The block comes from `quantization_config.weight_block_size`, never from the
two shapes: 1000 rows and 8 scales would suggest 125 where 128 is meant.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from msds.checkpoint.dtypes import E4M3FN_VALUES
from msds.errors import CheckpointError

SCALE_SUFFIX = "_scale_inv"
"""`<name>_scale_inv` holds the scales of `<name>`; despite its name it multiplies."""

Block = tuple[int, int]


def scale_grid(shape: tuple[int, ...], block: Block) -> tuple[int, int]:
    """The shape of the scales of a weight of `shape` [R, C]."""
    rows, columns = shape
    return -(-rows // block[0]), -(-columns // block[1])


def grid_index(ranges: list[tuple[int, int]], block: Block) -> tuple[slice, slice]:
    """The scales that the part of a weight between `ranges` (rows, columns) needs."""
    (row, row_end), (column, column_end) = ranges
    return (
        slice(row // block[0], max(row // block[0], -(-row_end // block[0]))),
        slice(column // block[1], max(column // block[1], -(-column_end // block[1]))),
    )


@dataclass(frozen=True)
class BlockScales:
    """The scales for one part of a weight, spread over its columns.

    `spread` float32 [block rows of the part, columns of the part]; `block_rows`: rows of a block; `origin`:
    row and column where the part begins in the weight `name`, which need not be on a block edge.
    """

    spread: NDArray[np.float32]
    block_rows: int
    origin: tuple[int, int]
    name: str

    @classmethod
    def of_part(
        cls, scales: NDArray[np.float32], ranges: list[tuple[int, int]], block: Block, name: str
    ) -> "BlockScales":
        """From `scales`, the part of the grid that `grid_index` names for `ranges` (rows, columns)."""
        if not np.isfinite(scales).all():
            raise CheckpointError(f"tensor {name}{SCALE_SUFFIX} holds scales that are not finite")
        (row, _), (column, column_end) = ranges
        block_of_column = np.arange(column, column_end) // block[1] - column // block[1]
        return cls(np.ascontiguousarray(scales[:, block_of_column]), block[0], (row, column), name)

    def apply(self, values: NDArray[np.float32], start: int) -> None:
        """Multiplies decoded `values` [rows, columns], rows `start` on of the part, in place.

        Raises CheckpointError if one of them is NaN: the codes 0x7F and 0xFF stand for no weight.
        """
        first_row, first_column = self.origin
        is_nan = np.isnan(values)
        if is_nan.any():
            row, column = (int(i) for i in np.unravel_index(int(is_nan.argmax()), values.shape))
            position = [first_row + start + row, first_column + column]
            raise CheckpointError(f"tensor {self.name} holds the float8 code for NaN at {position}")
        row = 0
        while row < len(values):
            absolute = first_row + start + row
            block = absolute // self.block_rows
            stop = min(len(values), row + (block + 1) * self.block_rows - absolute)
            values[row:stop] *= self.spread[block - first_row // self.block_rows]
            row = stop


def dequantise(
    codes: NDArray[np.uint8], scales: NDArray[np.float32], block: Block, name: str = "weight"
) -> NDArray[np.float32]:
    """float32 values of e4m3fn `codes` [R, C] with `scales` of `scale_grid` shape.

    Raises CheckpointError naming the tensor if the grid does not fit or a code is NaN.
    """
    if scales.shape != scale_grid(codes.shape, block):
        raise CheckpointError(wrong_grid(name, codes.shape, scales.shape, block))
    values = E4M3FN_VALUES[codes]
    ranges = [(0, codes.shape[0]), (0, codes.shape[1])]
    BlockScales.of_part(scales, ranges, block, name).apply(values, 0)
    return values


def wrong_grid(name: str, shape: tuple[int, ...], scales: tuple[int, ...], block: Block) -> str:
    """The fault of a scale grid that does not fit its weight."""
    return (
        f"tensor {name} {list(shape)} in blocks of {list(block)} needs a scale grid of "
        f"{list(scale_grid(shape, block))}, {name}{SCALE_SUFFIX} has {list(scales)}"
    )
