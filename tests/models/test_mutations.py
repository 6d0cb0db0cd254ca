"""Formulas changed one at a time: each change moves the numbers at least ten times beyond the tolerance of the tests.

Every row names the test that guards the formula. The models are the tiny ones cut to one layer, with experts where
the family has them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import pytest

import msds
from msds.engine.batch import Row
from msds.engine.runner import Runner
from msds_graphs.binding import assign
from tests.models.compare import IDS, TOLERANCE, difference, far_positions
from tests.models.kit import values_of
from tests.models.mtp_kit import Mtp
from tests.models.mutants import install, shortened
from tests.reference.checkpoints import numpy_forward

CAUGHT = 10 * TOLERANCE
DECODED = 7
"""Tokens of a text that decode takes one by one."""

Way = Literal["forward", "near", "hidden", "decode", "mtp", "mtp_hidden"]


@dataclass(frozen=True)
class Mutation:
    """file, changes: see `install`. way: what is compared with NumPy. guard: the tests that fail with it."""

    name: str
    file: str
    changes: dict[str, str]
    guard: str
    model: str = "v3_base"
    way: Way = "forward"
    plan: dict[str, str] = field(default_factory=dict)


SCALE = "(scaling.mla_softmax_factor if scaling is not None else 1.0)"
ROTARY, ROUTING, EQUALITY = "test_rotary.py", "test_routing.py", "test_equality.py::test_forward"
SCHEDULE, MTP = "test_properties.py::test_any_schedule_gives_the_logits_of_the_definition", "test_mtp.py"

MUTATIONS = [
    Mutation("scale without mscale squared", "rotary", {SCALE: "1.0"}, ROTARY),
    Mutation("scale with mscale once", "rotary", {SCALE: "scaling.mla_softmax_factor**0.5"}, ROTARY),
    Mutation("cosines grow by mscale", "rotary", {"scaling.amplitude": "scaling.mla_softmax_factor**0.5"}, ROTARY),
    Mutation(
        "YaRN betas swapped",
        "rotary",
        {
            "beta_fast=scaling.beta_fast": "beta_fast=scaling.beta_slow",
            "beta_slow=scaling.beta_slow": "beta_slow=scaling.beta_fast",
        },
        EQUALITY,
    ),
    Mutation(
        "YaRN ramp reversed",
        "rope",
        {"(1 - stretched + stretched / factor)": "(stretched + (1 - stretched) / factor)"},
        "test_rope.py::TestFrequencies::test_yarn_of_deepseek_v3",
    ),
    Mutation(
        "scaling of the rotation ignored",
        "rotary",
        {'if scaling is None or scaling.rope_type == "dynamic"': "if True"},
        EQUALITY,
        model="llama_llama3_rope",
    ),
    Mutation(
        "half rotation where pairs are interleaved",
        "rope",
        {
            "first = np.arange(0, rope_dim, 2) if interleaved": "first = np.arange(rope_dim // 2) if interleaved",
            "first + (1 if interleaved": "first + (rope_dim // 2 if interleaved",
        },
        "test_rope.py::TestRotation",
    ),
    Mutation(
        "interleaved rotation where pairs are halves",
        "rope",
        {
            "if interleaved else np.arange(rope_dim // 2)": "if interleaved else np.arange(0, rope_dim, 2)",
            "else rope_dim // 2)": "else 1)",
        },
        "test_rope.py::TestRotation",
        model="llama_base",
    ),
    Mutation(
        "positions ignored", "rope", {"positions.astype(ms.float32)": "(positions * 0).astype(ms.float32)"}, EQUALITY
    ),
    Mutation(
        "rope key not rotated", "deepseek", {"rotate(k_pe, rope[0], rope[1], True)[:, 0]": "k_pe[:, 0]"}, EQUALITY
    ),
    Mutation(
        "bias used as a weight", "deepseek", {"top_experts(choice, scores,": "top_experts(choice, choice,"}, ROUTING
    ),
    Mutation(
        "no bias in the ranking", "deepseek", {'choice = choice + gate["e_score_correction_bias"]': "pass"}, ROUTING
    ),
    Mutation(
        "best of a group instead of the sum of two",
        "moe",
        {"group_scores = group_scores + second": "pass"},
        ROUTING,
    ),
    Mutation(
        "refused groups masked with 0",
        "moe",
        {"NEGATIVE_INFINITY).reshape": "0.0).reshape"},
        ROUTING,
        model="v3_negative_bias",
    ),
    Mutation("no scaling factor", "deepseek", {"weights * config.routed_scaling_factor": "weights"}, ROUTING),
    Mutation("no normalisation", "deepseek", {"if config.norm_topk_prob and": "if False and"}, ROUTING),
    Mutation(
        "a single weight normalised",
        "deepseek",
        {"if config.norm_topk_prob and config.num_experts_per_tok > 1": "if config.norm_topk_prob"},
        ROUTING,
        model="v3_one_expert",
    ),
    Mutation(
        "V2 scales what it normalised",
        "deepseek",
        {'if config.model_type == "deepseek_v2"': "if False"},
        ROUTING,
        model="v2_norm_topk",
    ),
    Mutation(
        "shared experts dropped",
        "deepseek",
        {'y = y + swiglu_mlp(params["shared_experts"], x)': "pass"},
        EQUALITY,
    ),
    Mutation("gelu in the experts", "moe", {"ops.silu(_bmm_nt(": "ops.gelu(_bmm_nt("}, "test_moe.py::TestExperts"),
    Mutation(
        "gelu in the MLP",
        "linear",
        {'ops.silu(linear(node["gate_proj"]': 'ops.gelu(linear(node["gate_proj"]'},
        "test_linear.py::test_swiglu",
        model="llama_base",
    ),
    Mutation(
        "latent norms with the config's epsilon",
        "deepseek",
        {"LATENT_NORM_EPS = 1e-6": "LATENT_NORM_EPS = 1e-2"},
        EQUALITY,
        model="v3_norm_eps",
    ),
    Mutation(
        "causal mask off by one",
        "attention",
        {"earlier = positions.expand_dims(1) <= positions": "earlier = positions.expand_dims(1) <= 1 + positions"},
        "test_attention.py::test_causal_mask",
        way="near",
    ),
    Mutation(
        "query head h reads key head h % G",
        "attention",
        {
            "q = (q * scale).transpose(0, 2, 1, 3)": "q = (q * scale).reshape(sequences, queries, heads // groups, "
            "groups, key_dim).transpose(0, 3, 2, 1, 4)",
            "return out.reshape(sequences, heads, queries, value_dim).transpose(0, 2, 1, 3)": "return out.reshape("
            "sequences, groups, heads // groups, queries, value_dim).transpose(0, 3, 2, 1, 4).reshape("
            "sequences, queries, heads, value_dim)",
        },
        "test_attention.py::test_grouped_heads_read_neighbouring_queries",
        model="llama_base",
    ),
    Mutation(
        "hidden state before the final norm",
        "ends",
        {'"hidden": hidden, "is_finite": is_finite': '"hidden": x.reshape(hidden.shape), "is_finite": is_finite'},
        MTP,
        way="hidden",
    ),
    Mutation(
        "context mask off by one",
        "cache",
        {"seen = index <= positions": "seen = index <= positions + 1"},
        SCHEDULE,
        way="decode",
    ),
    Mutation(
        "cache read before it is written",
        "deepseek",
        {"cache_read(latent, ": 'cache_read(page["latent"], '},
        "test_properties.py::test_reference_implementations_equal_the_portable_ones",
        way="decode",
        plan={"cache_write": "reference"},
    ),
    Mutation(
        "absorbed scores without scale",
        "attention",
        {"features) * scale, latent)": "features), latent)"},
        SCHEDULE,
        way="decode",
    ),
    Mutation(
        "absorbed keys from the rows of the values",
        "deepseek_specs",
        {"kv_b[:, : config.qk_nope_head_dim]": "kv_b[:, config.qk_nope_head_dim :]"},
        "test_spec.py::test_absorbed_halves_are_cut_from_kv_b_proj",
        way="decode",
    ),
    Mutation(
        "MTP joins hidden and embedding the other way round",
        "deepseek",
        {"ops.concat((embedded, hidden), -1)": "ops.concat((hidden, embedded), -1)"},
        MTP,
        way="mtp",
    ),
    Mutation(
        "MTP sees the token of its own position",
        "deepseek",
        {
            'embed(params, batch["tokens"], plan.ranks), batch["hidden"]': "embed(params, ops.concat(("
            'batch["tokens"][:, :1], batch["tokens"][:, :-1]), 1), plan.ranks), batch["hidden"]'
        },
        MTP,
        way="mtp",
    ),
    Mutation(
        "MTP reads the slot of position 0, which has no entry",
        "deepseek",
        {"config, block_size, depth + 1)": "config, block_size, 0)"},
        MTP,
        way="mtp",
    ),
    Mutation(
        "MTP norms exchanged",
        "deepseek",
        {
            'layer["enorm"]["weight"]': 'layer["hnorm"]["weight"] ',
            'layer["hnorm"]["weight"],': 'layer["enorm"]["weight"],',
        },
        MTP,
        way="mtp",
    ),
    Mutation(
        "MTP returns its state before its norm",
        "ends",
        {'"hidden": hidden, "is_finite": is_finite': '"hidden": x.reshape(hidden.shape), "is_finite": is_finite'},
        MTP,
        way="mtp_hidden",
    ),
]


@pytest.fixture(scope="module")
def short(tiny, tmp_path_factory):
    """short(name) -> that variant with its second layer alone, which has experts in the DeepSeek variants."""
    root = tmp_path_factory.mktemp("short")
    return functools.cache(lambda name: shortened(tiny(name), root / name, 1))


def deviation(folder, way, plan=()):
    """How far the product, as it is now, is from NumPy: relative to the largest value."""
    if way.startswith("mtp"):
        steps, what = Mtp(folder), "hidden" if way == "mtp_hidden" else "logits"
        return difference(steps.run(0, steps.hidden)[what][0], steps.want(0, steps.hidden)[what])
    model = msds.load(folder, plan=msds.Plan(plan), mtp=False, progress=False)
    if way == "decode":
        return difference(decoded(model), numpy_forward(folder, IDS[:DECODED])["logits"])
    if way == "hidden":
        positions = np.arange(40)
        batch = {"tokens": IDS[None, :40], "positions": positions[None], "query_lens": np.array([40])}
        hidden = model._compiled_forward()({name: values.astype(np.int32) for name, values in batch.items()})["hidden"]
        return difference(hidden[0], numpy_forward(folder, IDS[:40])["hidden"])
    where = None if way == "near" else far_positions(folder.name, 40)
    return difference(model.logits(IDS[:40], where), numpy_forward(folder, IDS[:40], where)["logits"])


def decoded(model):
    """Logits [T, V] of a text that decode takes token by token from an empty cache."""
    bucket = {"S": 1, "Q": 1, "B": 2}
    runner = Runner(model, num_blocks=3, block_size=4, prefill_buckets=[bucket], decode_buckets=[bucket])
    rows = [Row([int(token)], place, [2, 1]) for place, token in enumerate(IDS[:DECODED])]
    return np.concatenate([runner.decode([row]).logits[0] for row in rows])


@pytest.mark.parametrize(("model", "way"), dict.fromkeys((mutation.model, mutation.way) for mutation in MUTATIONS))
def test_without_a_mutation_all_is_well(short, model, way):
    assert deviation(short(model), way) < TOLERANCE


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_mutation_is_caught(short, tmp_path, monkeypatch, mutation):
    install(monkeypatch, tmp_path, mutation.file, mutation.changes)
    assert deviation(short(mutation.model), mutation.way, mutation.plan) > CAUGHT, f"{mutation.guard} would not notice"


def test_stale_absorbed_weights_are_caught(short):
    """New canonical weights without their derived halves: guarded by test_new_weights_reach_every_compiled_step."""
    model = msds.load(short("v3_base"), mtp=False, progress=False)
    right = decoded(model)
    for layer in model.params["layers"]:
        bound = layer["self_attn"]["kv_b_proj"]["weight"]
        assign(bound, np.flip(values_of(bound), 0).copy())
    assert difference(decoded(model), right) < TOLERANCE  # decode still uses the old halves
    assert difference(decoded(model), model.logits(IDS[:DECODED])) > CAUGHT
