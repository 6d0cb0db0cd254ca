"""A complete GGUF of a random model, a few kilobytes, written with the gguf package."""

from pathlib import Path

import gguf
import numpy as np
from gguf.quants import quantize
from tokenizers import pre_tokenizers

HIDDEN, FFN, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 64, 96, 2, 4, 2, 16
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ġ t", "h e", "Ġt he", "4 2"]
TOKENS = [
    *SPECIAL,
    *sorted(pre_tokenizers.ByteLevel.alphabet()),
    "Ġt",
    "he",
    "Ġthe",
    "42",
    "xyz",
    "<tool>",
]  # no merge makes xyz
VOCABULARY = len(TOKENS)
TYPES = [3, 3, 3, *[1] * (len(TOKENS) - 4), 4]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def tensors(arch, tied=True, vocabulary=VOCABULARY):
    """GGUF name -> float32 values, [out, in]."""
    rng = np.random.default_rng(3)
    shapes = {"token_embd.weight": (vocabulary, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        inside = {
            "attn_norm.weight": (HIDDEN,),
            "attn_q.weight": (HEADS * HEAD_DIM, HIDDEN),
            "attn_k.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            "attn_v.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            "attn_output.weight": (HIDDEN, HEADS * HEAD_DIM),
            "ffn_norm.weight": (HIDDEN,),
            "ffn_gate.weight": (FFN, HIDDEN),
            "ffn_up.weight": (FFN, HIDDEN),
            "ffn_down.weight": (HIDDEN, FFN),
        }
        if arch == "qwen2":
            inside |= {f"attn_{part}.bias": inside[f"attn_{part}.weight"][:1] for part in "qkv"}
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in inside.items()}
    if not tied:
        shapes["output.weight"] = (vocabulary, HIDDEN)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def write_gguf(
    path: Path,
    arch="llama",
    *,
    weights=None,
    quantised=None,
    pre=None,
    model="gpt2",
    vocabulary=(TOKENS, TYPES),
    extra=None,
):
    """Writes the file; `extra(writer)` may add keys. `quantised`: a GGML type for the matrices of the layers."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0 if arch == "qwen2" else 100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre or {"llama": "smollm"}.get(arch, "qwen2"))
    writer.add_token_list(vocabulary[0])
    writer.add_token_types(vocabulary[1])
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    if extra is not None:
        extra(writer)
    for name, values in (tensors(arch) if weights is None else weights).items():
        if quantised is not None and name.startswith("blk.") and values.ndim == 2:
            writer.add_tensor(name, quantize(values, quantised), raw_dtype=quantised)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
