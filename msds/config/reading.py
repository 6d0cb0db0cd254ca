"""From a checkpoint folder to a config: strict, with all faults at once, before anything is loaded."""

import difflib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from msds.config import deepseek, llama
from msds.config.deepseek import DeepseekConfig, deepseek_faults, read_deepseek
from msds.config.fields import Fields, raise_faults, shown
from msds.config.llama import LlamaConfig, llama_faults, read_llama
from msds.config.shared import ARCHITECTURES
from msds.errors import ConfigError

ModelConfig = DeepseekConfig | LlamaConfig
MODEL_TYPES = (*deepseek.MODEL_TYPES, *llama.MODEL_TYPES)

_LFS_POINTER = "version https://git-lfs"


def read_config(path: str | Path) -> ModelConfig:
    """Read `config.json` (or the one in a folder), in the hub's style or transformers 5's.

    ConfigError lists every fault with field, value and nearest legal choice.
    """
    return _read(path)[0]


def config_warnings(path: str | Path) -> tuple[str, ...]:
    """What is odd but legal in the config that `read_config` accepts: unknown fields, defaults taken."""
    return _read(path)[1]


def parse_config(data: Mapping[str, object], source: str = "config.json") -> tuple[ModelConfig, tuple[str, ...]]:
    """A config from the fields of a config.json, and what is odd but legal in it."""
    model_type = data.get("model_type")
    fields = Fields(data)
    if model_type in deepseek.MODEL_TYPES:
        values = read_deepseek(fields)
        found = deepseek_faults(cast(DeepseekConfig, SimpleNamespace(**values)))
    elif model_type in llama.MODEL_TYPES:
        values = read_llama(fields)
        found = llama_faults(cast(LlamaConfig, SimpleNamespace(**values)))
    else:
        raise ConfigError(f"{source}: model_type = {shown(model_type)}: {_nearest_model_type(model_type)}")
    # Rules run on placeholders where a field is at fault; what they say about those is dropped.
    bad = {name for item in fields.faults for name in item.fields}
    raise_faults(source, fields.faults + [item for item in found if not bad & set(item.fields)])
    fields.warn_of_unseen()
    config = DeepseekConfig(**values) if model_type in deepseek.MODEL_TYPES else LlamaConfig(**values)
    return config, tuple(fields.warnings)


def config_json(config: ModelConfig) -> dict[str, object]:
    """The hub-style fields of a config.json that `read_config` reads back equal, for folders we write."""
    data: dict[str, Any] = asdict(config)
    data["eos_token_id"] = list(data.pop("eos_token_ids")) or None
    scaling, block = config.rope_scaling, data.pop("weight_block_size")
    if scaling is not None:
        used = _scaling_fields(scaling.rope_type, is_mla=isinstance(config, DeepseekConfig))
        data["rope_scaling"] = {name: value for name, value in data["rope_scaling"].items() if name in used}
    if block is not None:
        data["quantization_config"] = {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": list(block),
        }
    data["architectures"] = [ARCHITECTURES[config.model_type]]
    if isinstance(config, LlamaConfig):
        del data["attention_out_bias"]
    else:
        data["num_key_value_heads"] = config.num_attention_heads  # transformers' class default is 128
    return data


def _scaling_fields(rope_type: str, *, is_mla: bool) -> set[str]:
    names = {"rope_type", "factor", "original_max_position_embeddings"}
    if rope_type == "llama3":
        names |= {"low_freq_factor", "high_freq_factor"}
    if rope_type == "yarn":
        names |= {"beta_fast", "beta_slow", "truncate", "attention_factor"}
    return names | ({"mscale", "mscale_all_dim"} if rope_type == "yarn" or is_mla else set())


def read_json(path: Path) -> dict[str, object]:
    """One JSON object from a file; ConfigError names the file and what is wrong with it."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; give a checkpoint folder with a config.json") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as UTF-8 text: {error}") from None
    if text.startswith(_LFS_POINTER):
        raise ConfigError(f"{path} is a Git LFS pointer, not the file; fetch it with `git lfs pull`")
    try:
        data = json.loads(text, object_pairs_hook=_refuse_repetition)
    except (json.JSONDecodeError, RecursionError) as error:
        folder = "" if path.suffix == ".json" else "; is it the model's folder that is meant?"
        raise ConfigError(f"{path} is not JSON: {error}{folder}") from None
    except _RepetitionError as error:
        raise ConfigError(f"{path}: field {error} is given twice; keep one of them") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path} holds {shown(data)}; an object {{...}} is wanted")
    return data


class _RepetitionError(Exception):
    """A JSON object that spells one key twice, of which parsers silently keep the last."""


def _refuse_repetition(pairs: list[tuple[str, object]]) -> dict[str, object]:
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            raise _RepetitionError(name)
        seen.add(name)
    return dict(pairs)


def _read(path: str | Path) -> tuple[ModelConfig, tuple[str, ...]]:
    if not str(path):
        raise ConfigError("the model's path is empty: name its folder, or . for the current one")
    place = Path(path)
    file = place / "config.json" if place.is_dir() else place
    data = read_json(file)
    descriptions = sorted(file.parent.glob("quant_model_description*.json"))
    if descriptions:
        raise ConfigError(
            f"{descriptions[0]}: a checkpoint quantised by ModelSlim is not read; "
            "load this model's BF16 checkpoint, or its FP8 one with block scales"
        )
    return parse_config(data, str(file))


def _nearest_model_type(model_type: object) -> str:
    near = difflib.get_close_matches(str(model_type), MODEL_TYPES, n=2, cutoff=0.6)
    hint = f"; the nearest supported: {', '.join(near)}" if near else ""
    return f"not supported{hint} (supported: {', '.join(MODEL_TYPES)})"
