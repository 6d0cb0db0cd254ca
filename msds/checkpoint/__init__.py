"""Checkpoints: reading, checking, loading and writing safetensors, and importing GGUF."""

from msds.checkpoint.checks import check_checkpoint
from msds.checkpoint.gguf import convert_gguf
from msds.checkpoint.header import TensorInfo
from msds.checkpoint.ledger import Entry, Ledger, Skip
from msds.checkpoint.loading import CheckpointWarning, load
from msds.checkpoint.manifest import MANIFEST_NAME, read_manifest, verify_manifest, write_manifest
from msds.checkpoint.save import TensorSource, raw_source, tensor_source, write_checkpoint, write_file
from msds.checkpoint.shard_cache import Held, ShardCache, check_shard_folder, shard_file, shard_key
from msds.checkpoint.shards import Checkpoint
from msds.checkpoint.tied import shares_embedding

__all__ = [
    "MANIFEST_NAME",
    "Checkpoint",
    "CheckpointWarning",
    "Entry",
    "Held",
    "Ledger",
    "ShardCache",
    "Skip",
    "TensorInfo",
    "TensorSource",
    "check_checkpoint",
    "check_shard_folder",
    "convert_gguf",
    "load",
    "raw_source",
    "read_manifest",
    "shard_file",
    "shard_key",
    "shares_embedding",
    "tensor_source",
    "verify_manifest",
    "write_checkpoint",
    "write_file",
    "write_manifest",
]
