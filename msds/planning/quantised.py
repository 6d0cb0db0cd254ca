"""The spec tree of quantised weights, for counting them: execution of these schemes does not exist yet.

w8a8: int8 weights and int8 activations (scaled per token as they come); w8a16: int8 weights, products in the number
type of the activations. Both keep one float32 scale per output row. Quantised are the projections of attention, MLPs
and experts; embedding, head, norms, router, eh_proj and the absorbed copies of kv_b_proj stay as they are, as in
DeepSeek's own FP8 files.
"""

import re

from msds.errors import OptionError
from msds_graphs.specs import ArraySpec
from msds_graphs.trees import Tree, tree_from_items, tree_items

SCHEMES = ("none", "w8a8", "w8a16")

_QUANTISED = re.compile(r"(layers|mtp)\.\d+\.(self_attn|mlp)\.(.*\.)?\w*_(proj|with_mqa)(\.weight)?")


def is_quantised(path: str) -> bool:
    """Whether the weight at a path is one that the schemes quantise."""
    return _QUANTISED.fullmatch(path) is not None


def quantised_spec(spec: Tree, scheme: str) -> Tree:
    """Every quantised weight [..., out, in] becomes {"q": int8 [..., out, in], "scale": float32 [..., out]}."""
    if scheme not in SCHEMES:
        raise OptionError(f"quant is {scheme!r}: use one of {', '.join(SCHEMES)}")
    if scheme == "none":
        return spec
    pairs: list[tuple[str, ArraySpec]] = []
    for path, leaf in tree_items(spec):
        if is_quantised(path):
            pairs.append((f"{path}.q", ArraySpec(leaf.shape, "int8", leaf.axes)))
            pairs.append((f"{path}.scale", ArraySpec(leaf.shape[:-1], "float32", leaf.axes[:-1])))
        else:
            pairs.append((path, leaf))
    return tree_from_items(pairs)
