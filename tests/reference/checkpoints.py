"""Writes the catalogue's checkpoints with transformers, reads them with safetensors, runs either reference.

Nothing here imports msds. Weights are drawn in NumPy, each from its own stream (seed and tensor name), with a
spread of 1 / sqrt(inputs): scores, gates and logits are of order one then, and each formula moves the logits.
transformers writes what it can: the files of a variant are its own unless the variant needs what it does not
write (MTP layers, FP8, a stored tied head, bfloat16 with a float32 bias), in which case they are rewritten.
"""

from __future__ import annotations

import functools
import json
import re
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tests.reference import numpy_deepseek, numpy_llama
from tests.reference.numpy_deepseek import Array, dequantise, is_moe_layer
from tests.reference.tiny_tokenizer import write_tokenizer
from tests.reference.variants import VARIANTS, Config, Variant

Tensors = dict[str, torch.Tensor]

FP8_BLOCK = 16
FP8_MAX = 448.0  # largest e4m3fn
_QUANTISED = re.compile(r"layers\.\d+\.(self_attn|mlp)\..*proj(_with_mqa)?\.weight$")
_FLOAT32 = re.compile(r"e_score_correction_bias$|weight_scale_inv$")

torch.set_num_threads(1)  # tiny matrices; a second thread waits a scheduler slice on a shared machine


def draw(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """float32: norms 1 + 0.2 N, biases 0.1 N, matrices N / sqrt(inputs)."""
    values = np.random.default_rng([seed, zlib.crc32(name.encode())]).standard_normal(shape, dtype=np.float32)
    if "norm" in name:
        values = 1 + 0.2 * values
    elif name.endswith("bias"):
        values *= 0.1
    elif shape:
        values /= np.sqrt(shape[-1])
    return torch.from_numpy(values.astype(np.float32))


def write_checkpoint(
    name: str,
    folder: Path,
    *,
    style: Literal["hub", "transformers5"] = "hub",
    shards: int = 1,
    dtype: Literal["float32", "bfloat16"] = "float32",
    tokenizer: bool = False,
    seed: int = 0,
) -> Path:
    """Writes variant `name` into a new folder and returns it; the same arguments write the same values.

    style: `config.json` as on the hub (`rope_scaling`, `torch_dtype`), or as transformers 5 saves it
    (`rope_parameters`, `dtype`), the latter only where transformers understands the config.
    shards: about that many weight files with an index; 1 is a single `model.safetensors`.
    """
    variant = VARIANTS[name]
    if style == "transformers5" and (variant.writer or variant.fp8):
        raise ValueError(f"{name}: transformers cannot hold this config, so it has no transformers 5 style")
    if dtype == "bfloat16" and variant.fp8:
        raise ValueError(f"{name}: FP8 settles the other types by itself")
    folder.mkdir(parents=True)
    config = {**variant.config, **({} if variant.fp8 else {"torch_dtype": dtype})}
    if variant.fp8:
        config["quantization_config"] = {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
        }
    writer_config = {**variant.config, **variant.writer}
    _save_with_transformers(writer_config, folder, shards, seed)
    edited = _edit(_read(folder), variant, dtype, seed)
    if edited is not None:
        _rewrite(edited, folder, shards)
    if style == "hub":
        (folder / "config.json").write_text(json.dumps(config, indent=2))
    if tokenizer:
        write_tokenizer(folder)
    return folder


@contextmanager
def _no_empty_layer_warning() -> Iterator[None]:
    """Models without shared experts: transformers builds them with width 0, and torch remarks on it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Initializing zero-element tensors is a no-op")
        yield


def _save_with_transformers(config: Config, folder: Path, shards: int, seed: int) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    (folder / "config.json").write_text(json.dumps(config))
    with _no_empty_layer_warning():
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    tensors = model.state_dict()
    for name, tensor in tensors.items():
        if not (name == "lm_head.weight" and config["tie_word_embeddings"]):
            tensor.copy_(draw(name, tuple(tensor.shape), seed))
    total = sum(tensor.nbytes for tensor in tensors.values())
    model.save_pretrained(folder, max_shard_size=total if shards == 1 else total // shards)


def _edit(tensors: Tensors, variant: Variant, dtype: str, seed: int) -> Tensors | None:
    """The tensors that must be on disk where transformers wrote others, else None."""
    config, edited = variant.config, dict(tensors)
    for name, tensor in tensors.items():
        if not tensor.numel():  # transformers writes shared experts of width 0
            del edited[name]
    if variant.family == "deepseek_v3":
        for layer in range(config["num_hidden_layers"]):
            prefix = f"model.layers.{layer}.mlp."
            if f"{prefix}gate.weight" in tensors and not is_moe_layer(config, layer):
                edited = {name: tensor for name, tensor in edited.items() if not name.startswith(prefix)}
                edited |= _mlp(prefix, config["hidden_size"], config["intermediate_size"], seed)
        for depth in range(config["num_nextn_predict_layers"]):
            edited |= _mtp_layer(config, config["num_hidden_layers"] + depth, tensors, seed)
    if variant.bias_shift:
        for name in [name for name in edited if name.endswith("e_score_correction_bias")]:
            edited[name] = edited[name] + variant.bias_shift
    if variant.stored_head == "copy":
        edited["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    elif variant.stored_head == "different":
        edited["lm_head.weight"] = draw("lm_head.weight", (config["vocab_size"], config["hidden_size"]), seed)
    if variant.fp8:
        edited = _quantise(edited)
    if dtype == "bfloat16" or variant.fp8:
        edited = {name: _as_bfloat16(name, tensor) for name, tensor in edited.items()}
    is_untouched = edited.keys() == tensors.keys() and all(edited[name] is tensors[name] for name in tensors)
    return None if is_untouched else edited


def _mlp(prefix: str, hidden: int, inner: int, seed: int) -> Tensors:
    shapes = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    names = {f"{prefix}{name}.weight": shape for name, shape in shapes.items()}
    return {name: draw(name, shape, seed) for name, shape in names.items()}


def _mtp_layer(config: Config, layer: int, tensors: Tensors, seed: int) -> Tensors:
    """A MoE layer, what joins the two inputs, and the copies of embedding and head that the hub stores."""
    hidden, inner, prefix = config["hidden_size"], config["moe_intermediate_size"], f"model.layers.{layer}."
    attention = "model.layers.0.self_attn."  # the same shapes in every layer
    shapes = {
        f"{prefix}self_attn.{name.removeprefix(attention)}": tuple(tensor.shape)
        for name, tensor in tensors.items()
        if name.startswith(attention)
    }
    for norm in ("input_layernorm", "post_attention_layernorm", "enorm", "hnorm", "shared_head.norm"):
        shapes[f"{prefix}{norm}.weight"] = (hidden,)
    shapes[f"{prefix}eh_proj.weight"] = (hidden, 2 * hidden)
    shapes[f"{prefix}mlp.gate.weight"] = (config["n_routed_experts"], hidden)
    shapes[f"{prefix}mlp.gate.e_score_correction_bias"] = (config["n_routed_experts"],)
    out = {name: draw(name, shape, seed) for name, shape in shapes.items()}
    for expert in range(config["n_routed_experts"]):
        out |= _mlp(f"{prefix}mlp.experts.{expert}.", hidden, inner, seed)
    if config["n_shared_experts"]:
        out |= _mlp(f"{prefix}mlp.shared_experts.", hidden, inner * config["n_shared_experts"], seed)
    embedding = tensors["model.embed_tokens.weight"]
    out[f"{prefix}embed_tokens.weight"] = embedding.clone()
    out[f"{prefix}shared_head.head.weight"] = tensors.get("lm_head.weight", embedding).clone()
    return out


def _quantise(tensors: Tensors) -> Tensors:
    """Linears of the layers to e4m3 with one scale per block, named `weight_scale_inv` as on the hub."""
    out: Tensors = {}
    for name, tensor in tensors.items():
        if _QUANTISED.search(name):
            out[name], out[f"{name}_scale_inv"] = _quantise_blocks(tensor)
        else:
            out[name] = tensor
    return out


def _quantise_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, cols = weight.shape
    grid = (-(-rows // FP8_BLOCK), -(-cols // FP8_BLOCK))
    # Random blocks have nearly equal maxima; spread them, so that a scale read from the wrong block shows.
    spread = 2.0 ** ((torch.arange(grid[0])[:, None] * 3 + torch.arange(grid[1])[None, :] * 5) % 4 - 1.5)
    padded = torch.zeros(grid[0] * FP8_BLOCK, grid[1] * FP8_BLOCK)
    padded[:rows, :cols] = weight
    blocks = padded.reshape(grid[0], FP8_BLOCK, grid[1], FP8_BLOCK) * spread[:, None, :, None]
    scale = blocks.abs().amax(dim=(1, 3)) / FP8_MAX
    quantised = (blocks / scale[:, None, :, None]).reshape(padded.shape)[:rows, :cols]
    return quantised.to(torch.float8_e4m3fn).contiguous(), scale


def _as_bfloat16(name: str, tensor: torch.Tensor) -> torch.Tensor:
    keep = _FLOAT32.search(name) or tensor.dtype == torch.float8_e4m3fn
    return tensor if keep else tensor.to(torch.bfloat16)


def _rewrite(tensors: Tensors, folder: Path, shards: int) -> None:
    """Replaces the weight files of a folder; several files get an index, as on the hub."""
    for path in folder.glob("model*.safetensors*"):
        path.unlink()
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for shard, part in enumerate(np.array_split(np.arange(len(names)), shards), start=1):
        file = f"model-{shard:05d}-of-{shards:05d}.safetensors"
        chosen = {names[i]: tensors[names[i]] for i in part}
        save_file(chosen, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(chosen, file)
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def _read(folder: Path) -> Tensors:
    tensors: Tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    return tensors


def read_config(folder: Path) -> Config:
    """The raw `config.json`."""
    config: Config = json.loads((folder / "config.json").read_text())
    return config


def to_numpy_tensors(folder: Path) -> dict[str, Array]:
    """All tensors of a folder as float32 arrays, FP8 blocks dequantised and their scales gone."""
    tensors = _read(folder)
    arrays = {name: tensor.to(torch.float32).numpy() for name, tensor in tensors.items()}
    for name in [name for name in arrays if name.endswith("_scale_inv")]:
        rows, cols = read_config(folder)["quantization_config"]["weight_block_size"]
        weight = name.removesuffix("_scale_inv")
        arrays[weight] = dequantise(arrays[weight], arrays.pop(name), (rows, cols))
    return arrays


@functools.lru_cache(maxsize=8)
def _transformers_model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    with _no_empty_layer_warning():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


def transformers_logits(folder: Path, token_ids: Any, positions: Any = None) -> Array:
    """[T, V] float32 logits of one sequence in one forward pass; positions [T] may have gaps."""
    ids = torch.as_tensor(np.asarray(token_ids), dtype=torch.int64)[None]
    where = torch.arange(ids.shape[1]) if positions is None else torch.as_tensor(np.asarray(positions))
    # Without a mask transformers takes a gap in the positions for the start of another, packed sequence.
    mask = torch.ones_like(ids)
    with torch.no_grad():
        out = _transformers_model(folder)(input_ids=ids, position_ids=where[None], attention_mask=mask, use_cache=False)
    logits: Array = out.logits[0].numpy()
    return logits


def transformers_greedy(folder: Path, token_ids: Any, count: int) -> list[int]:
    """The next `count` ids, each the argmax of a full forward pass: no cache, no stop at the end token."""
    ids = list(token_ids)
    for _ in range(count):
        ids.append(int(transformers_logits(folder, ids)[-1].argmax()))
    return ids[len(ids) - count :]


def numpy_forward(folder: Path, token_ids: Any, positions: Any = None, **options: Any) -> dict[str, Any]:
    """`forward` of the NumPy reference of the folder's family: logits, hidden and, when asked, layers."""
    config = read_config(folder)
    is_deepseek = config["model_type"].startswith("deepseek")
    model = numpy_deepseek if is_deepseek else numpy_llama
    out: dict[str, Any] = model.forward(to_numpy_tensors(folder), config, token_ids, positions, **options)
    return out


def reference_logits(name: str, folder: Path, token_ids: Any, positions: Any = None) -> Array:
    """[T, V] logits from whoever decides variant `name`, written at `folder`."""
    if VARIANTS[name].reference == "transformers":
        return transformers_logits(folder, token_ids, positions)
    logits: Array = numpy_forward(folder, token_ids, positions)["logits"]
    return logits
