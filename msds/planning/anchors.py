"""Published speeds to put beside the estimates. Conditions differ from any plan here: read them with each figure.

An A3 figure counts packages of two dies; it is halved here, since a rank is a die.
"""

from dataclasses import dataclass

from msds.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class Anchor:
    """tokens_per_second of one rank. limit: seconds per token and text that it was reached under, None for prefill and
    for a single text."""

    mesh: str
    model: str
    phase: str
    tokens_per_second: float
    limit: float | None
    conditions: str
    source: str


_V3, _QWEN_1_5B = "deepseek-v3 shape", "r1-distill-qwen-1.5b shape"
_CLOUDMATRIX = "CloudMatrix-Infer, arXiv 2506.12708"

ANCHORS = (
    Anchor(
        mesh="a2",
        model=_V3,
        phase="decode",
        tokens_per_second=808,
        limit=0.1,
        conditions="W8A8, 32 NPUs decode beside 16 that prefill",
        source="Huawei technical report, quoted in the press of May 2025",
    ),
    Anchor(
        mesh="a2",
        model=_V3,
        phase="decode",
        tokens_per_second=850 / 16,
        limit=0.038,
        conditions="16 NPUs; the record says BF16, whose weights alone exceed 16 x 64 GiB",
        source="evokernel record of MindIE, submitted by machine: low trust",
    ),
    Anchor(
        mesh="a3",
        model=_V3,
        phase="decode",
        tokens_per_second=1943 / 2,
        limit=0.05,
        conditions="INT8, experts over 320 dies, separate prefill, MTP",
        source=_CLOUDMATRIX,
    ),
    Anchor(
        mesh="a3",
        model=_V3,
        phase="decode",
        tokens_per_second=538 / 2,
        limit=0.015,
        conditions="as above, at a tighter limit",
        source=_CLOUDMATRIX,
    ),
    Anchor(
        mesh="a3",
        model=_V3,
        phase="decode",
        tokens_per_second=454 / 2,
        limit=0.05,
        conditions="V3.1 W8A8, 4 nodes, averaged over prefill and decode NPUs, 3.5k in, 1.5k out",
        source="vllm-ascend issue 12349, a user's measurement",
    ),
    Anchor(
        mesh="a3",
        model=_V3,
        phase="prefill",
        tokens_per_second=6688 / 2,
        limit=None,
        conditions="INT8, 4k prompts, large batches, separate decode",
        source=_CLOUDMATRIX,
    ),
    Anchor(
        mesh="a2",
        model=_QWEN_1_5B,
        phase="single text",
        tokens_per_second=168.9,
        limit=None,
        conditions="one 910B2, one text; our launching time was chosen near this figure",
        source="ascend-rs, a Rust engine",
    ),
)


def anchors_for(config: ModelConfig, mesh_kind: str) -> tuple[Anchor, ...]:
    """The figures for models of this shape on this kind of hardware."""
    shape = (config.model_type, config.num_hidden_layers, config.hidden_size)
    known = {("deepseek_v3", 61, 7168): _V3, ("qwen2", 28, 1536): _QWEN_1_5B}
    return tuple(item for item in ANCHORS if item.mesh == mesh_kind and item.model == known.get(shape))
