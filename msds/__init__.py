"""DeepSeek on Ascend as pure functions."""

__version__ = "0.1.0"
