"""Bytes of a rank by arithmetic on published sizes, sharing nothing with the planner."""

from __future__ import annotations

GIB = 2**30
BUDGET = 64 * GIB * 9 // 10


def v3_weight_bytes(tp: int, ep: int, ranks: int, *, int8: bool, mtp: bool = False) -> int:
    """DeepSeek-V3/R1 without pipeline: bf16, or int8 projections with a float32 scale per row; fp32 router."""
    rest = ranks // ep
    d, heads = 7168, 128 // tp

    def matrix(rows: int, columns: int, count: int = 1) -> int:
        return count * (rows * columns + 4 * rows if int8 else 2 * rows * columns)

    attention = matrix(1536, d) + matrix(heads * 192, 1536) + matrix(576, d)
    attention += matrix(heads * 256, 512) + matrix(d, heads * 128)
    attention += 2 * (1536 + 512)  # two norms
    attention += 2 * heads * 256 * 512  # absorbed copies stay bf16

    def mlp(width: int) -> int:
        return 2 * matrix(width, d) + matrix(d, width)

    experts = 256 // ep * (2 * matrix(2048 // rest, d) + matrix(d, 2048 // rest))
    moe = 4 * (256 * d + 256) + experts + mlp(2048 // tp)
    layer = attention + 2 * 2 * d
    total = 3 * (layer + mlp(18432 // tp)) + 58 * (layer + moe)
    total += 2 * (2 * 129280 // tp * d) + 2 * d
    if mtp:
        total += layer + moe + 2 * (d * 2 * d) + 3 * 2 * d
    return total


def v3_cache_bytes(texts: int, length: int, *, layers: int = 61) -> int:
    """bf16 latents of one replica: 576 values per token and layer, in blocks of 16, one block reserved."""
    return (1 + texts * -(-length // 16)) * 16 * 576 * 2 * layers


DENSE = {
    # hidden, inner, layers, heads, key/value heads, vocabulary, biases of q, k and v
    "r1-distill-qwen-1.5b": (1536, 8960, 28, 12, 2, 151936, True),
    "r1-distill-qwen-7b": (3584, 18944, 28, 28, 4, 152064, True),
    "r1-distill-qwen-14b": (5120, 13824, 48, 40, 8, 152064, True),
    "r1-distill-qwen-32b": (5120, 27648, 64, 40, 8, 152064, True),
    "r1-distill-llama-8b": (4096, 14336, 32, 32, 8, 128256, False),
    "r1-distill-llama-70b": (8192, 28672, 80, 64, 8, 128256, False),
}


def dense_weight_bytes(name: str, tp: int) -> int:
    """bf16, heads of 128, an untied head."""
    d, inner, layers, heads, kv_heads, vocab, has_bias = DENSE[name]
    q, kv = heads * 128 // tp, kv_heads * 128 // tp
    layer = (q + 2 * kv) * (d + has_bias) + d * q + 3 * d * inner // tp + 2 * d
    return 2 * (layers * layer + 2 * (vocab // tp) * d + d)


def dense_cache_bytes(name: str, tp: int, texts: int, length: int) -> int:
    """bf16 keys and values of one replica."""
    layers, kv_heads = DENSE[name][2], DENSE[name][4]
    return (1 + texts * -(-length // 16)) * 16 * 2 * (kv_heads // tp) * 128 * 2 * layers
