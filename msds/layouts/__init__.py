"""Checkpoints in MindSpore's training layouts: read as if they had Hugging Face names, and written."""

from msds.layouts.convert import compare_folders, convert_to_hf, convert_to_mindspore
from msds.layouts.locate import is_training_checkpoint
from msds.layouts.orders import LAYOUT_NAME, Orders, parse_orders
from msds.layouts.view import TrainingCheckpoint, open_checkpoint, open_training

__all__ = [
    "LAYOUT_NAME",
    "Orders",
    "TrainingCheckpoint",
    "compare_folders",
    "convert_to_hf",
    "convert_to_mindspore",
    "is_training_checkpoint",
    "open_checkpoint",
    "open_training",
    "parse_orders",
]
