"""A tiny model as MindSpore training would store it, written by code that knows nothing of msds: names and row orders
of MindFormers spelled out with torch, slices cut by hand, strategy files by MindSpore's own protobuf classes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]

SIMPLE = {
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "self_attn.q_a_proj": "attention.q2l_proj",
    "self_attn.q_a_layernorm": "attention.lq_norm",
    "self_attn.kv_a_layernorm": "attention.lkv_norm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.shared_experts.gate_proj": "feed_forward.shared_experts.w1",
    "mlp.shared_experts.up_proj": "feed_forward.shared_experts.w3",
    "mlp.shared_experts.down_proj": "feed_forward.shared_experts.w2",
    "mlp.gate": "feed_forward.routed_experts.router.dense",
}
OUTER = {
    "model.embed_tokens.weight": "model.tok_embeddings.embedding_weight",
    "model.norm.weight": "model.norm_out.weight",
    "lm_head.weight": "lm_head.weight",
}


def read(folder: Path) -> Tensors:
    """All tensors of a folder's safetensors."""
    tensors: Tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    return tensors


def without_mtp(folder: Path, target: Path) -> Path:
    """A copy of a tiny checkpoint without MTP layers."""
    shutil.copytree(folder, target)
    config = json.loads((folder / "config.json").read_text())
    prefix = f"model.layers.{config['num_hidden_layers']}."
    tensors = {name: tensor for name, tensor in read(folder).items() if not name.startswith(prefix)}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 0}))
    return target


def mindformers(folder: Path) -> Tensors:
    """The tensors of a Hugging Face folder as MindFormers 1.x trains them."""
    config = json.loads((folder / "config.json").read_text())
    tensors, out = read(folder), {}
    stacks: dict[str, list[torch.Tensor]] = {}
    for name, tensor in tensors.items():
        if name in OUTER:
            out[OUTER[name]] = tensor
            continue
        layer, rest = name.removeprefix("model.layers.").split(".", 1)
        prefix = f"model.layers.{layer}."
        base, _, kind = rest.rpartition(".")
        if rest == "mlp.gate.e_score_correction_bias":
            out[f"{prefix}feed_forward.routed_experts.router.router.topk_bias"] = tensor
        elif base in SIMPLE:
            out[f"{prefix}{SIMPLE[base]}.{kind}"] = tensor
        elif base.startswith("mlp.experts."):
            part = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}[base.rsplit(".", 1)[1]]
            key = f"{prefix}feed_forward.routed_experts.ffn.{part}.weight"
            expert = int(base.split(".")[2])
            stacks.setdefault(key, [torch.empty(0)] * config["n_routed_experts"])[expert] = tensor
        else:
            out |= _latent_attention(prefix + "attention.", base.rsplit(".", 1)[1], tensor, config)
    return out | {key: torch.stack(parts) for key, parts in stacks.items()}


def _latent_attention(prefix: str, name: str, tensor: torch.Tensor, config: dict[str, Any]) -> Tensors:
    heads, nope, rope = config["num_attention_heads"], config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    columns = tensor.shape[1]
    halves = [*range(0, rope, 2), *range(1, rope, 2)]
    if name == "q_b_proj":
        by_head = tensor.reshape(heads, nope + rope, columns)
        return {
            f"{prefix}l2q_nope_proj.weight": by_head[:, :nope].reshape(-1, columns).contiguous(),
            f"{prefix}l2q_pe_proj.weight": by_head[:, nope:][:, halves].reshape(-1, columns).contiguous(),
        }
    if name == "kv_a_proj_with_mqa":
        return {
            f"{prefix}kv2l_latent_kv.weight": tensor[:-rope].contiguous(),
            f"{prefix}kv2l_k_pe.weight": tensor[-rope:][halves].contiguous(),
        }
    assert name == "kv_b_proj", name
    by_head = tensor.reshape(heads, nope + config["v_head_dim"], columns)
    return {
        f"{prefix}lkv2kv_k_nope.weight": by_head[:, :nope].reshape(-1, columns).contiguous(),
        f"{prefix}lkv2kv_v.weight": by_head[:, nope:].reshape(-1, columns).contiguous(),
    }


def cut_axis(name: str) -> int | None:
    """The axis that two tensor-parallel ranks cut a MindFormers tensor along; None: both hold all of it."""
    if "ffn.w" in name:
        return 0  # experts
    if any(part in name for part in (".wo.", ".w2.", "shared_experts.w2.")):
        return 1
    parts = ("l2q_", "lkv2kv", ".wq.", ".wk.", ".wv.", ".w1.", ".w3.", "tok_embeddings", "lm_head")
    return 0 if any(part in name for part in parts) else None


def write_ranks(tensors: Tensors, folder: Path, *, form: str = "safetensors", **extra: Any) -> None:
    """Two `rank_N` folders and `strategy.ckpt`: MindSpore writes .ckpt, the safetensors library the other form."""
    layouts: dict[str, tuple[list[int], list[int]]] = {}
    for rank in range(2):
        mine: Tensors = {}
        for name, tensor in tensors.items():
            axis = cut_axis(name)
            mine[name] = tensor if axis is None else tensor.chunk(2, axis)[rank].contiguous()
            layouts[name] = ([2], [0 if axis == place else -1 for place in range(tensor.ndim)])
        place = folder / f"rank_{rank}"
        place.mkdir(parents=True)
        if form == "safetensors":
            save_file(mine, place / f"tiny_rank_{rank}-1_10.safetensors", metadata={"format": "ms"})
        else:
            save_ckpt(mine, place / f"tiny_rank_{rank}-1_10.ckpt", **extra)
    write_strategy(layouts, folder / "strategy.ckpt")


def save_ckpt(tensors: Tensors, path: Path, **extra: Any) -> None:
    """A .ckpt by `mindspore.save_checkpoint`."""
    import mindspore as ms

    items = []
    for name, tensor in tensors.items():
        dtype = ms.bfloat16 if tensor.dtype == torch.bfloat16 else None
        items.append({"name": name, "data": ms.Tensor(tensor.to(torch.float32).numpy(), dtype)})
    ms.save_checkpoint(items, str(path), **extra)


def write_strategy(layouts: dict[str, Any], path: Path, *, stage: int = 0) -> None:
    """A strategy file: name -> (device matrix, tensor map[, optimiser step, size])."""
    from mindspore.train.node_strategy_pb2 import ParallelStrategyMap

    message = ParallelStrategyMap()
    message.current_stage = stage
    for name, (devices, axes, *optimiser) in layouts.items():
        item = message.parallel_layout_item.add()
        item.param_name = name
        layout = item.parallel_layouts
        layout.dev_matrix.add().dim.extend(devices)
        layout.tensor_map.add().dim.extend(axes)
        layout.param_split_shape.add()
        layout.field = 0
        layout.opt_weight_shard_step, layout.opt_weight_shard_size = optimiser or (0, 0)
    path.write_bytes(message.SerializeToString())


def assert_same(first: Tensors, second: Tensors) -> None:
    """Names, types, shapes and every bit."""
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype, name
        np.testing.assert_array_equal(bits(tensor), bits(second[name]), err_msg=name)


def bits(tensor: torch.Tensor) -> np.ndarray:
    """The bytes of a tensor, with its shape in front."""
    return tensor.contiguous().view(torch.uint8).numpy() if tensor.ndim else tensor.reshape(1).view(torch.uint8).numpy()
