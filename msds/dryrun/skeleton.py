"""The dense skeleton of a model under MindSpore's own AutoParallel: a second opinion on where a plan communicates.

A stack of NUM_LAYERS layers with attention and a dense MLP, of the model's own sizes. Each weight's Layout comes from
the same spec and rules as the slices of the plan, each product's Layouts from those of its weight; what MindSpore
inserts between them is its own. Rotation, causality and what is around the layers are left out.

T = S * Q tokens of all replicas, D hidden, H heads, N features of a head's query and key, V of its value.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mindspore as ms
from mindspore import nn, ops
from mindspore.parallel import Layout
from mindspore.parallel.auto_parallel import AutoParallel

from msds.config import DeepseekConfig
from msds.dryrun.job import Job
from msds.dryrun.opinion import NUM_LAYERS
from msds.models.specs import model_specs
from msds_graphs.binding import ms_dtype
from msds_graphs.dryrun import simulate
from msds_graphs.dryrun.ir import GraphText
from msds_graphs.faults import explain
from msds_graphs.sharding import Rules
from msds_graphs.specs import ArraySpec

WHOLE = "None"
"""MindSpore's name for a dimension that is not cut."""


class Cuts:
    """Layouts over the plan's replicas and their ranks: (dp, tp)."""

    def __init__(self, job: Job) -> None:
        self.rules: Rules = job.demand.rules
        self.dp, self.tp = job.shards.dp, job.shards.tp
        self._layout = Layout((job.shards.dp, job.shards.tp), ("dp", "tp"))

    def __call__(self, *axes: str) -> Any:
        return self._layout(*axes)

    def of(self, spec: ArraySpec) -> tuple[str, ...]:
        """The mesh axis of each dim of a weight."""
        return tuple((self.rules.axes[axis] if axis else None) or WHOLE for axis in spec.axes)


class Linear(nn.Cell):  # type: ignore[misc]  # MindSpore has no types
    """[T, in] -> [T, out]; a cut `in` leaves MindSpore a sum to take."""

    def __init__(self, name: str, spec: ArraySpec, cuts: Cuts) -> None:
        super().__init__()
        out, into = cuts.of(spec)
        self.weight = simulate.declare_one(spec, name, requires_grad=True)
        self.product = ops.MatMul(transpose_b=True).shard((cuts("dp", into), cuts(out, into)))

    def construct(self, x):  # type: ignore[no-untyped-def]  # parsed by MindSpore
        return self.product(x, self.weight)


class Norm(nn.Cell):  # type: ignore[misc]  # MindSpore has no types
    """[T, features] -> the same."""

    def __init__(self, name: str, spec: ArraySpec, cuts: Cuts) -> None:
        super().__init__()
        self.weight = simulate.declare_one(spec, name, requires_grad=True)
        self.norm = ops.RmsNorm().shard((cuts("dp", WHOLE), cuts(WHOLE)))

    def construct(self, x):  # type: ignore[no-untyped-def]  # parsed by MindSpore
        return self.norm(x, self.weight)[0]


class Layer(nn.Cell):  # type: ignore[misc]  # MindSpore has no types
    """Expanded MLA and a dense MLP: [T, D] -> [T, D]."""

    def __init__(self, config: DeepseekConfig, spec: Any, path: str, cuts: Cuts, sequences: int) -> None:
        super().__init__()
        attention, mlp = spec["self_attn"], spec["mlp"]

        def linear(part: str, name: str) -> Linear:
            return Linear(f"{path}.{part}.{name}.weight", spec[part][name]["weight"], cuts)

        def norm(name: str, node: Any) -> Norm:
            return Norm(f"{path}.{name}.weight", node["weight"], cuts)

        self.has_q_lora = "q_a_proj" in attention
        if self.has_q_lora:
            self.q_a = linear("self_attn", "q_a_proj")
            self.q_norm = norm("self_attn.q_a_layernorm", attention["q_a_layernorm"])
            self.q_b = linear("self_attn", "q_b_proj")
        else:
            self.q_b = linear("self_attn", "q_proj")
        # what the cache holds, its rope part included; the norm sees the latent alone
        self.kv_a = linear("self_attn", "kv_a_proj_with_mqa")
        self.kv_norm = norm("self_attn.kv_a_layernorm", attention["kv_a_layernorm"])
        self.kv_b = linear("self_attn", "kv_b_proj")
        self.core = Attention(config, sequences, cuts)
        self.o = linear("self_attn", "o_proj")
        self.gate, self.up, self.down = (linear("mlp", f"{name}_proj") for name in ("gate", "up", "down"))
        width = cuts.of(mlp["gate_proj"]["weight"])[0]
        self.silu = ops.auto_generate.SiLU().shard((cuts("dp", width),))
        self.mul = ops.Mul().shard((cuts("dp", width), cuts("dp", width)))
        self.add = ops.Add().shard((cuts("dp", WHOLE), cuts("dp", WHOLE)))
        self.norm_in = norm("input_layernorm", spec["input_layernorm"])
        self.norm_out = norm("post_attention_layernorm", spec["post_attention_layernorm"])
        self.latent = ops.StridedSlice().shard(((cuts.dp, 1),))
        self.kv_lora_rank = config.kv_lora_rank

    def construct(self, x):  # type: ignore[no-untyped-def]  # parsed by MindSpore
        normed = self.norm_in(x)
        q = self.q_b(self.q_norm(self.q_a(normed))) if self.has_q_lora else self.q_b(normed)
        compressed = self.kv_a(normed)
        latent = self.latent(compressed, (0, 0), (x.shape[0], self.kv_lora_rank), (1, 1))
        x = self.add(x, self.o(self.core(q, self.kv_b(self.kv_norm(latent)))))
        normed = self.norm_out(x)
        return self.add(x, self.down(self.mul(self.silu(self.gate(normed)), self.up(normed))))


class Attention(nn.Cell):  # type: ignore[misc]  # MindSpore has no types
    """Softmax attention of every head over its own sequence, all tokens seeing each other: [T, H * (N + R)] queries and
    [T, H * (N + V)] keys and values -> [T, H * V]."""

    def __init__(self, config: DeepseekConfig, sequences: int, cuts: Cuts) -> None:
        super().__init__()
        self.sequences, self.num_heads = sequences, config.num_attention_heads
        self.nope, self.value = config.qk_nope_head_dim, config.v_head_dim
        by_head = cuts("dp", "tp", WHOLE, WHOLE)
        self.reshape = ops.Reshape()
        self.to_heads = ops.Transpose().shard((cuts("dp", WHOLE, "tp", WHOLE),))
        self.part = ops.StridedSlice().shard(((cuts.dp, cuts.tp, 1, 1),))
        self.scores = ops.BatchMatMul(transpose_b=True).shard((by_head, by_head))
        self.softmax = ops.Softmax(-1).shard((by_head,))
        self.mix = ops.BatchMatMul().shard((by_head, by_head))
        self.to_tokens = ops.Transpose().shard((by_head,))

    def construct(self, q, kv):  # type: ignore[no-untyped-def]  # parsed by MindSpore
        tokens = q.shape[0]
        heads = (self.sequences, tokens // self.sequences, self.num_heads)
        q = self.to_heads(self.reshape(q, (*heads, -1)), (0, 2, 1, 3))  # [S, H, Q, N + R]
        kv = self.to_heads(self.reshape(kv, (*heads, -1)), (0, 2, 1, 3))  # [S, H, Q, N + V]
        end = (heads[0], heads[2], heads[1])
        q = self.part(q, (0, 0, 0, 0), (*end, self.nope), (1, 1, 1, 1))
        k = self.part(kv, (0, 0, 0, 0), (*end, self.nope), (1, 1, 1, 1))
        v = self.part(kv, (0, 0, 0, self.nope), (*end, self.nope + self.value), (1, 1, 1, 1))
        out = self.mix(self.softmax(self.scores(q, k)), v)
        return self.reshape(self.to_tokens(out, (0, 2, 1, 3)), (tokens, -1))


class Stack(nn.Cell):  # type: ignore[misc]  # MindSpore has no types
    """Layers one after the other: [T, D] -> [T, D]."""

    def __init__(self, layers: list[Layer]) -> None:
        super().__init__()
        self.layers = nn.CellList(layers)

    def construct(self, x):  # type: ignore[no-untyped-def]  # parsed by MindSpore
        for layer in self.layers:
            x = layer(x)
        return x


class Gradients(nn.Cell):  # type: ignore[misc]  # MindSpore has no types
    """The weights' gradients of the sum of what a stack gives."""

    def __init__(self, stack: Stack, cuts: Cuts) -> None:
        super().__init__()
        self.stack = stack
        self.weights = ms.ParameterTuple(stack.trainable_params())
        self.total = ops.ReduceSum().shard(((cuts.dp, 1),))
        self.gradient = ms.grad(self.loss, grad_position=None, weights=self.weights)

    def loss(self, x):  # type: ignore[no-untyped-def]  # parsed by MindSpore
        return self.total(self.stack(x))

    def construct(self, x):  # type: ignore[no-untyped-def]  # parsed by MindSpore
        return self.gradient(x)


def layouts_graph(job: Job, bucket: dict[str, int], *, backward: bool) -> GraphText:
    """The graph of NUM_LAYERS dense layers under the plan's Layouts, for the bucket's tokens in every replica."""
    config = job.demand.config
    assert isinstance(config, DeepseekConfig)
    cuts = Cuts(job)
    sequences = job.shards.dp * bucket["S"]
    dense = replace(config, first_k_dense_replace=NUM_LAYERS, num_hidden_layers=NUM_LAYERS, num_nextn_predict_layers=0)
    layers = model_specs(dense).spec(dense, job.demand.dtype)["layers"]
    stack = Stack([Layer(dense, spec, f"layers.{i}", cuts, sequences) for i, spec in enumerate(layers)])
    net = AutoParallel(Gradients(stack, cuts) if backward else stack, parallel_mode="semi_auto")
    net.dataset_strategy("full_batch")
    x = ms.Tensor(shape=(sequences * bucket["Q"], config.hidden_size), dtype=ms_dtype(job.demand.dtype), init="zeros")
    what = f"compiling {NUM_LAYERS} layers under Layouts{' with gradients' if backward else ''}"
    try:
        return simulate.compiled_graph(lambda: net.compile(x))
    except RuntimeError as error:
        raise explain(error, what) from error
