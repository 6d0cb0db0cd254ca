"""What a checkpoint folder contains, from its config, headers and tokenizer files; no weights are read."""

from msds.inspect.gather import inspect_model
from msds.inspect.report import CacheSize, Inspection, MtpLayers, StoredTensors, TokenizerSummary

__all__ = ["CacheSize", "Inspection", "MtpLayers", "StoredTensors", "TokenizerSummary", "inspect_model"]
